"""Plans over HTTP: made by one process, kept while nothing changes, refused in words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from atoll.hub.app import HubOptions
from atoll.hub.planning.planner import Planner
from atoll.hub.server import HubServer
from atoll.wire.messages import Beat, NodeInfo
from tests.hub.http.test_api import client_with, error_of, submit
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S

STATS = {"latency_ms": 4.0, "up_bps": 50e6, "down_bps": 90e6}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(
        data=tmp_path / "data", jobs=tmp_path / "jobs", reducers=False, dead_after_s=3600.0
    )
    with HubServer(options) as server:
        yield server


@pytest.fixture
def client(hub: HubServer) -> Iterator[httpx.Client]:
    with client_with(hub, hub.operator_token) as opened:
        yield opened


def planner_of(hub: HubServer) -> Planner:
    assert hub.hub is not None
    return hub.hub.planner


def machine(hub: HubServer, client: httpx.Client, name: str) -> Peer:
    """Let a machine join that has reported its figures."""
    body = {"secret": hub.ticket.rpartition("/")[2], "name": name}
    token = client.post("/api/join", json=body).json()["token"]
    info = NodeInfo(
        hostname=name, system="Linux", python="3.11", atoll="1", slots=1, memory_bytes=16 * 10**9,
        matmul_gflops=200.0,
    )  # fmt: skip
    peer = Peer(hub, name, token=token, info=info)
    peer.tell(Beat(STATS, 1.0))
    return peer


def test_a_plan_is_made_once_for_the_machines_that_are_there(
    hub: HubServer, client: httpx.Client
) -> None:
    job = submit(client)
    error = error_of(client.get(f"/api/jobs/{job}/plan"), 400)
    assert error["what"] == "no machine is online at this hub"
    with machine(hub, client, "study"), machine(hub, client, "attic"):
        deadline = time.monotonic() + PATIENCE_S
        while [row["state"] for row in client.get("/api/nodes").json()] != ["online"] * 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with ThreadPoolExecutor() as pool:
            asks = [pool.submit(client.get, f"/api/jobs/{job}/plan") for _ in range(3)]
            found, *others = [ask.result().json() for ask in asks]
        assert found["machines"] == 2
        assert found["candidates"][0] == found["best"]
        presets = [row["preset"] for row in found["candidates"]]
        assert len(set(presets)) == len(presets)
        assert found["considered"] > len(presets)
        assert any("alone" in reason for reason in found["reasons"])
        assert others == [found, found]
        assert planner_of(hub).started == 1


def test_what_cannot_be_planned_is_said(hub: HubServer, client: httpx.Client) -> None:
    wrong = client.post("/api/plan", json={"spec": "[train]\nstep = 3\n"})
    assert error_of(wrong, 400)["remedy"] == "did you mean 'steps'?"
    error_of(client.get("/api/jobs/missing/plan"), 404)
    assert hub.hub is not None
    planner_of(hub)._torch = False
    error = error_of(client.post("/api/plan", json={"spec": '[job]\nname = "a"\n'}), 409)
    assert error["given"] == "torch is not installed on its machine"
    assert "atoll plan job.toml" in error["remedy"]
    assert planner_of(hub).started == 0
