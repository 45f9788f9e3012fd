"""What the page shows of islands over several machines."""

from __future__ import annotations

from playwright.sync_api import expect

from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.dashboard.conftest import Watch
from tests.hub.cluster import Cluster, spec


def test_further_machines_stand_behind_their_member(hub: HubServer, watched: Watch) -> None:
    cluster = Cluster(hub, "a", "b", "c", "d")
    with HubClient(hub.url, hub.operator_token) as client:
        job = client.submit(spec())
    launched = {name: cluster.launch(name) for name in "abcd"}
    cluster.tell("b", launched["b"], "running")
    error = {"kind": "JobError", "what": "no way to the first machine"}
    with watched() as seen:
        page = seen.go(f"jobs/{job}/members")
        rows = page.locator("tbody tr")
        expect(rows).to_have_count(4)
        for row, (name, where) in enumerate(
            [("w0", "a"), ("w0.1", "b"), ("w1", "c"), ("w1.1", "d")]
        ):
            expect(rows.nth(row).locator("td").nth(0)).to_have_text(where)
            expect(rows.nth(row).locator("td").nth(1)).to_have_text(name)
        expect(rows.nth(1)).to_contain_text("running")
        cluster.tell("d", launched["d"], "exited", exit_code=1, error=error)
        expect(rows.nth(3).locator("td[data-name=Launches]")).to_have_text("2")
        page = seen.go(f"jobs/{job}")
        expect(page.locator(".tiles")).to_contain_text("each: shard=2 on 2 machines")
        page = seen.go("fleet/b")
        expect(page.locator(".node-panel")).to_contain_text(f"{job}/w0.1")
        assert seen.problems == []
    cluster.close()
