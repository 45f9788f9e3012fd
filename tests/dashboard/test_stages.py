"""The page of a SWARM: stages, their members and shares, who moved and why, what it waits for."""

from __future__ import annotations

from playwright.sync_api import expect

from atoll.wire.messages import Leaving
from tests.dashboard.conftest import Watch
from tests.dashboard.kinds import swarm
from tests.dashboard.scene import Scene


def test_stages_show_members_shares_and_moves(scene: Scene, watched: Watch) -> None:
    job, peers = swarm(scene)
    names = [str(member["node"]) for member in scene.placed(job)]
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        card = page.locator("#stages")
        stages = card.locator(".stage")
        expect(stages).to_have_count(3)
        expect(stages.nth(0)).to_contain_text("44 rows/s · needs 2.1 GB")
        expect(stages.nth(0)).to_contain_text("5 of 8")
        peer = stages.nth(1).locator(".peers li", has_text=names[2])
        expect(peer).to_contain_text("14 rows/s")
        expect(peer).to_contain_text("queue 1")
        expect(peer).to_contain_text("60 %")
        expect(peer).to_contain_text("25 % direct")
        banned = stages.nth(2).locator(".peers li", has_text=names[3])
        expect(banned.locator(".pill")).to_have_text("banned")
        expect(banned).to_contain_text("failed 1×")
        expect(banned).to_contain_text("sent nothing")
        expect(stages.nth(1).locator(".pill", has_text="slowest")).to_be_visible()
        expect(page.get_by_text("Value of each node")).to_be_hidden()
        peers[0].request(Leaving("preempted"))
        expect(card.locator(".moves li")).to_contain_text("stage 0 had no member")
        expect(stages.nth(0).locator(".pill", has_text="recovering")).to_be_visible()
        for peer_ in peers[1:]:
            peer_.request(Leaving("preempted"))
        expect(page.locator(".reason").first).to_contain_text("no member serves stages 0, 1, 2")
        expect(page.locator("#job-state-now")).to_have_text("paused")
        seen.keep("swarm-paused")
        assert seen.problems == []


def test_jobs_that_are_no_swarm_have_no_stages(scene: Scene, watched: Watch) -> None:
    job = scene.submit("plain")
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.get_by_role("heading", name=job)).to_be_visible()
        expect(page.locator("#stages")).to_be_hidden()
