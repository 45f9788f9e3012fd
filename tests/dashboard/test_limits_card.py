"""The card of limits: the fullest first, reached ones red, at both widths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from atoll.hub.app import HubOptions
from atoll.hub.quotas.limits import Quotas
from atoll.hub.server import HubServer
from tests.dashboard.conftest import Watch
from tests.dashboard.scene import Scene


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    """A hub with small limits."""
    quotas = Quotas(job_disk=200_000, queue=100_000, job_queues=400_000)
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, quotas=quotas
    )
    with HubServer(options) as server:
        yield server


@pytest.mark.parametrize("width", [1440, 390])
def test_who_uses_how_much_is_shown(scene: Scene, watched: Watch, width: int) -> None:
    job = scene.submit("greedy", nodes=1)
    for name, nbytes, status in (("a.bin", 150_000, 201), ("b.bin", 100_000, 429)):
        answer = scene.http.put(f"/api/jobs/{job}/files/{name}", content=b"x" * nbytes)
        assert answer.status_code == status
    scene.http.post("/api/queues/put", json={"queue": "work", "key": "a", "payload": "aGhp" * 9000})
    with watched(width=width) as seen:
        page = seen.go("events/limits")
        row = page.locator("tbody tr", has_text="job disk").first
        expect(row).to_contain_text("greedy")
        expect(row).to_contain_text("1 time, last")
        expect(row).to_have_class("critical")
        expect(page.locator("tbody tr").first).to_contain_text("greedy")
        expect(page.locator("tbody tr", has_text="job queues")).to_contain_text("work")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        seen.keep(f"limits-{width}")
        assert seen.problems == []
