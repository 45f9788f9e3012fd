"""The hub as a process, killed with -9 in the middle of work and started again."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from atoll.wire.messages import NodeInfo
from tests.hub.peer import Peer
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.name != "posix", reason="kill -9 is a signal of POSIX"),
]

LEASE_S = 2.0
PUTS_BEFORE_THE_KILL = 150


class Process:
    """One life of a hub."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll.hub", "--host", "127.0.0.1", "--port", str(port),
             "--data", str(folder / "data"), "--jobs", str(folder / "jobs")],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.ready: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.client = httpx.Client(
            base_url=self.ready["url"],
            headers={"authorization": f"Bearer {self.ready['operator_token']}"},
            trust_env=False,
            timeout=PATIENCE_S,
            limits=httpx.Limits(max_connections=20),
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.is_success, answer.text
        return dict(answer.json())

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def life(folder: Path, port: int = 0) -> Iterator[Process]:
    process = Process(folder, port)
    try:
        yield process
    finally:
        process.close()


def put(hub: Process, key: str) -> dict[str, Any]:
    payload = base64.b64encode(key.encode()).decode()
    return hub.post("/api/queues/put", queue="q", key=key, payload=payload)


def claim(hub: Process, **more: Any) -> list[dict[str, Any]]:
    answer = hub.post("/api/queues/claim", queue="q", lease_s=LEASE_S, limit=500, **more)
    return list(answer["items"])


def test_nothing_acknowledged_is_lost_when_the_hub_is_killed(tmp_path: Path) -> None:
    accepted: set[str] = set()
    with life(tmp_path) as hub, ThreadPoolExecutor(8) as producers:
        for number in range(10):
            put(hub, f"early-{number}")
        early = claim(hub)
        for item in early[:5]:
            hub.post("/api/queues/ack", queue="q", lease=item["lease"])
        done = {item["key"] for item in early[:5]}
        leased = {item["key"] for item in early[5:]}
        job = hub.post("/api/jobs", spec='[job]\nname = "toy"\nnodes = 3\n')["job"]

        enough = threading.Event()

        def produce(name: int) -> None:
            with contextlib.suppress(httpx.TransportError):
                for number in range(100_000):
                    key = f"{name}-{number}"
                    put(hub, key)
                    accepted.add(key)
                    if len(accepted) >= PUTS_BEFORE_THE_KILL:
                        enough.set()

        working = [producers.submit(produce, name) for name in range(8)]
        assert enough.wait(PATIENCE_S)
        hub.kill()
        for work in working:
            work.result(PATIENCE_S)

    with life(tmp_path, port=hub.ready["port"]) as again:
        assert again.ready["ticket"] == hub.ready["ticket"]
        assert again.client.get(f"/api/jobs/{job}").json()["state"] == "waiting"
        sample = next(iter(accepted))
        assert put(again, sample)["duplicate"]
        assert all(put(again, key)["duplicate"] for key in done)
        back: set[str] = set()
        while not accepted | leased <= back:
            items = claim(again, wait_s=LEASE_S * 3)
            assert items, f"lost: {sorted((accepted | leased) - back)[:10]}"
            for item in items:
                back.add(item["key"])
                assert base64.b64decode(item["payload"]).decode() == item["key"]
                again.post("/api/queues/ack", queue="q", lease=item["lease"])
        assert not done & back


def test_a_hub_with_four_nodes_is_small_and_ends_cleanly(tmp_path: Path) -> None:
    with life(tmp_path) as hub, contextlib.ExitStack() as nodes:
        server: Any = SimpleNamespace(
            port=hub.ready["port"], operator_token=hub.ready["operator_token"]
        )
        for number in range(4):
            info = NodeInfo(f"n{number}", "Linux", "3.11", "0.1", cores=2)
            nodes.enter_context(Peer(server, f"n{number}", info=info))
        assert len(hub.client.get("/api/nodes").json()) == 4
        assert hub.client.get("/metrics").is_success
        assert psutil.Process(hub.process.pid).memory_info().rss <= 90e6
        nodes.close()
        hub.process.terminate()
        assert hub.process.wait(PATIENCE_S) == 0
