"""The page of a modular model: modules and their holders, each path, its shard and its losses."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from atoll.wire.paths import PathAsk, PathShard, PathTurn
from tests.dashboard.conftest import Watch
from tests.dashboard.kinds import MODULAR, modular
from tests.dashboard.scene import Scene


def test_page_shows_modules_paths_and_shards(scene: Scene, watched: Watch) -> None:
    job, dealt, busy = modular(scene)
    early = (busy + 1) % 3
    first = dealt[early][0] // 2  # its module of the first level
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        card = page.locator("#paths")
        expect(card).to_contain_text("phase 0 of 3 · 2 × 2 modules · 4 paths")
        expect(card).to_contain_text("18 documents in 4 shards")
        expect(card.locator(".pill", has_text="empty shards: 2")).to_be_visible()
        modules = card.locator(".modules li")
        expect(modules).to_have_count(4)
        expect(modules.nth(1)).to_contain_text("paths 2-3")
        expect(modules.nth(first)).to_contain_text(str(scene.placed(job)[early]["node"]))
        rows = card.locator("tbody tr")
        expect(rows).to_have_count(4)
        own = rows.nth(dealt[early][0])
        expect(own).to_contain_text("trained")
        expect(own).to_contain_text("2.500")
        expect(own).to_contain_text("2.750 at 100")
        expect(rows.nth(dealt[busy][1]).locator(".pill")).to_have_text("training")
        expect(rows.nth(dealt[busy][1])).to_contain_text("40")
        expect(rows.nth(dealt[busy][0]).locator(".pill")).to_have_text("waiting")
        expect(rows.nth(3)).to_contain_text("90 tokens")
        assert seen.problems == []


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.every(2)
def test_256_paths_have_room_on_the_page(scene: Scene, watched: Watch, width: int) -> None:
    spec = MODULAR.replace("[2, 2]", "[16, 16]")
    job = str(scene.http.post("/api/jobs", json={"spec": spec}).json()["job"])
    peers = scene.start(job)
    shards = [PathShard(number, 100 * number) for number in range(256)]
    waiting = [peer.ask(PathAsk(-1, phases=3, process="a", shards=shards)) for peer in peers]
    for peer, asked in zip(peers, waiting, strict=True):
        assert isinstance(peer.answer(asked), PathTurn)
    with watched(width=width) as seen:
        page = seen.go(f"jobs/{job}")
        card = page.locator("#paths")
        expect(card).to_contain_text("16 × 16 modules · 256 paths")
        expect(card.locator(".modules li")).to_have_count(32)
        expect(card.locator(".modules li").nth(1)).to_contain_text("paths 16-31")
        expect(card.locator("tbody tr")).to_have_count(256)
        if width > 1000:  # a phone shows a list of cards, without a row of headings
            card.get_by_role("button", name="Documents").click()
        expect(card.locator("tbody tr").first).to_contain_text("0 tokens")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"paths-256-{width}")
        assert seen.problems == []


def test_jobs_without_paths_show_none(scene: Scene, watched: Watch) -> None:
    job = scene.submit("plain")
    with watched() as seen:
        page = seen.go(f"jobs/{job}")
        expect(page.get_by_role("heading", name=job)).to_be_visible()
        expect(page.locator("#paths")).to_be_hidden()
