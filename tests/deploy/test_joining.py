"""The words of the compose file, started as processes: nodes first, and they find the hub."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli.hub_access import find
from atoll.errors import HubUnreachable
from bench.kit.ports import free_port
from tests.deploy.test_compose import content, defaults
from tests.patience import PATIENCE_S
from tests.tiers import sampled

pytestmark = pytest.mark.e2e


class Machines:
    """The services of the compose file as processes of this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()

    def start(self, name: str) -> None:
        words = [defaults(word) for word in content()["services"][name]["command"]]
        home = self.folder / name
        words = [word.replace("/ticket/", f"{self.folder}/ticket/") for word in words]
        words = [word.replace("=/data/", f"={home}/") for word in words]
        words = [word.replace("--advertise=hub", "--advertise=127.0.0.1") for word in words]
        words += ["--port", str(self.port)] if name == "hub" else ["--name", name]
        self.running[name] = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *words],
            env={**os.environ, "ATOLL_HOME": str(home), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def end(self, name: str) -> int:
        """End one as a container is ended; return its exit status."""
        process = self.running[name]
        process.send_signal(signal.SIGTERM)
        grace = content()["services"][name]["stop_grace_period"]
        return process.wait(timeout=float(grace.removesuffix("s")))

    def online(self) -> set[str]:
        nodes: list[dict[str, Any]] = []
        with (
            contextlib.suppress(HubUnreachable),  # it starts
            find(home=self.folder / "hub").client() as client,
        ):
            nodes = client.nodes()
        return {node["node"] for node in nodes if node["state"] == "online"}


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for process in made.running.values():
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def until(condition: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "count",
    sampled(
        [1, 4],
        lambda count: count == 1,
        "tests/deploy/test_joining.py::test_nodes_wait_for_the_ticket_join_and_leave",
    ),
)
def test_nodes_wait_for_the_ticket_join_and_leave(machines: Machines, count: int) -> None:
    nodes = set(sorted(name for name in content()["services"] if name != "hub")[-count:])
    assert len(nodes) == count
    for name in sorted(nodes):
        machines.start(name)
    machines.start("hub")
    until(lambda: (machines.folder / "ticket" / "ticket").exists())
    until(lambda: (machines.folder / "hub" / "hubs.json").exists())
    until(lambda: machines.online() == nodes)
    assert machines.end("node4") == 0
    until(lambda: machines.online() == nodes - {"node4"})
    assert machines.end("hub") == 0
    machines.start("hub")
    machines.start("node4")  # it is the node that it was
    until(lambda: machines.online() == nodes)
