"""The page of a SWARM: stages, their members and shares, who moved and why, what it waits for."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from atoll.swarm.routing import BOTH
from atoll.wire.messages import (
    Leaving,
    SwarmAnnounce,
    SwarmDone,
    SwarmLeases,
    SwarmPlace,
    SwarmWant,
    SwarmWatch,
)
from atoll.wire.swarm import Holder, SwarmFailure
from tests.dashboard.conftest import Scheme, Watch
from tests.dashboard.scene import Scene
from tests.hub.peer import Peer

SPEC = """
[job]
name = "large"
nodes = 6
[train]
steps = 400
[strategy]
preset = "ddp"
inner = "swarm"
[swarm]
stages = 3
microbatches = 8
needs_gb = [2.1, 1.4, 2.3]
"""
RATES = {0: 44.0, 1: 22.0, 2: 14.0, 3: 20.0, 4: 16.0, 5: 15.0}
"""Rows per second by slot."""


def announced(peer: Peer, body: SwarmAnnounce) -> SwarmPlace:
    place = peer.request(body)
    assert isinstance(place, SwarmPlace), place
    return place


def serving(peers: list[Peer]) -> list[tuple[SwarmPlace, Holder]]:
    """Let members take over stages: 0, then 1 and 2 in turns."""
    found = []
    for slot, peer in enumerate(peers):
        stage = 0 if slot == 0 else 1 + slot % 2
        rate, dial = 1 / (BOTH * RATES[slot]), ["10.0.0.1:7"] if slot % 2 else []
        place = announced(peer, SwarmAnnounce(stage=stage, row_s=rate, dial=dial))
        body = SwarmAnnounce(place.epoch, stage, place.step, row_s=rate, dial=dial)
        place = announced(peer, body)
        assert place.ready
        found.append((place, Holder(f"w{slot}", place.epoch)))
    return found


def train(peers: list[Peer], places: list[tuple[SwarmPlace, Holder]], *, count: int) -> None:
    """Bring microbatches through; w3 failed at the last of them."""
    driver, holder = peers[0], places[0][1]
    leases = driver.request(SwarmWant(holder.epoch, room=count))
    assert isinstance(leases, SwarmLeases)
    for number, lease in enumerate(leases.leases):
        path = [holder, places[2 if number % 3 else 4][1], places[1 if number % 2 else 5][1]]
        body = SwarmDone(
            lease.step, lease.index, lease.lease, [0, 1, 2], path, queues={"w1": 3.0, "w2": 1.0}
        )  # fmt: skip
        driver.request(body)
    failures = [SwarmFailure("w3", "the member is not connected", 60.0)]
    driver.request(SwarmWatch(holder.epoch, 0, failures=failures))
    peers[2].request(SwarmWatch(places[2][1].epoch, 0, direct_bytes=1, relayed_bytes=3))


@pytest.mark.parametrize(("width", "scheme"), [(1360, "light"), (360, "dark")])
def test_stages_show_members_shares_and_moves(
    scene: Scene, watched: Watch, width: int, scheme: Scheme
) -> None:
    job = str(scene.http.post("/api/jobs", json={"spec": SPEC}).json()["job"])
    peers = scene.start(job)
    places = serving(peers)
    train(peers, places, count=5)
    with watched(width=width, scheme=scheme) as seen:
        page = seen.go(f"jobs/{job}")
        card = page.locator("#stages")
        stages = card.locator(".stage")
        expect(stages).to_have_count(3)
        expect(stages.nth(0)).to_contain_text("44 rows/s · needs 2.1 GB")
        expect(stages.nth(0)).to_contain_text("5 of 8")
        peer = stages.nth(1).locator(".peers li", has_text="w2")
        expect(peer).to_contain_text("14 rows/s")
        expect(peer).to_contain_text("queue 1")
        expect(peer).to_contain_text("60 %")
        expect(peer).to_contain_text("25 % direct")
        banned = stages.nth(2).locator(".peers li", has_text="w3")
        expect(banned.locator(".pill")).to_have_text("banned")
        expect(banned).to_contain_text("failed 1×")
        expect(banned).to_contain_text("sent nothing")
        expect(stages.nth(1).locator(".pill", has_text="slowest")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        expect(page.get_by_text("Value of each node")).to_be_hidden()
        seen.keep(f"swarm-{scheme}-{width}")
        peers[0].request(Leaving("preempted"))
        expect(card.locator(".moves li")).to_contain_text("stage 0 had no member")
        expect(stages.nth(0).locator(".pill", has_text="recovering")).to_be_visible()
        for peer_ in peers[1:]:
            peer_.request(Leaving("preempted"))
        expect(page.locator(".reason").first).to_contain_text("no member serves stages 0, 1, 2")
        expect(page.locator("#job-state-now")).to_have_text("paused")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"swarm-paused-{scheme}-{width}")
        assert seen.problems == []


def test_jobs_that_are_no_swarm_have_no_stages(scene: Scene, watched: Watch) -> None:
    job = scene.submit("plain")
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.get_by_role("heading", name=job)).to_be_visible()
        expect(page.locator("#stages")).to_be_hidden()
