"""Two machines with a slow, long line between them: hub and one node here, the other node there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.netlab.lab import Lab
from tests.commands import Done
from tests.e2e.conftest import Atoll, Running, shared_cache, until
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab]

HUB, FAR = 0, 1
PORT = 7700

ASK = """
import json, sys
from atoll.cli.hub_access import find
with find().client() as client:
    (job,) = client.jobs()
    print(json.dumps({"job": job, "rounds": client.rounds(job["job"])["rounds"]}))
"""


class TwoMachines(Atoll):
    """The `atoll` command on hosts of a network lab."""

    def __init__(self, folder: Path, lab: Lab, *, cache: Path) -> None:
        super().__init__(folder, cache=cache)
        self.lab = lab

    def on(self, host: int, *words: str) -> Running:
        """Start `atoll WORDS` on a host, which has a home of its own."""
        return self._start(host, ["-m", "atoll.cli", *words])

    def ask(self) -> dict[str, Any]:
        """Return the job and its rounds as the hub tells them."""
        done = self._start(HUB, ["-c", ASK]).wait()
        assert done.code == 0, done.both
        answer: dict[str, Any] = json.loads(done.out)
        return answer

    def _start(self, host: int, arguments: list[str]) -> Running:
        popen = self.lab.popen(
            host,
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(self.folder / f"home{host}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(popen)
        return Running(popen)

    def gather(self) -> None:
        """Start the hub and a node on the near host, and a node on the far one."""
        hub = self.on(HUB, "hub", "--port", str(PORT), "--advertise", "h0")
        assert hub.popen.stdout is not None
        ticket = ""
        while not ticket:
            line = hub.popen.stdout.readline()
            assert line, hub.wait().both
            ticket = next((word for word in line.split() if word.startswith("atoll://h0:")), "")
        for host, name in ((HUB, "near"), (FAR, "far")):
            self.on(host, "join", ticket, "--name", name)

    def train(self, job: Path) -> Running:
        return self.on(HUB, "run", str(job), "--runs", "fetched")

    def summary(self) -> dict[str, Any]:
        (folder,) = (self.folder / "fetched").iterdir()
        found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        return found


@pytest.fixture
def machines(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=2, rate="20mbit", rtt="60ms") as lab:
        made = TwoMachines(tmp_path, lab, cache=shared_cache(tmp_path_factory))
        try:
            yield made
        finally:
            made.end()


def check(machines: TwoMachines, done: Done, *, route: str, alone: bool = False) -> None:
    """Assert that a job went well, on the route that was asked for, with both machines.

    `alone` allows rounds of one machine while the other could not be reached.
    """
    assert done.code == 0, done.both
    told = machines.ask()
    assert {member["node"] for member in told["job"]["members"]} == {"near", "far"}
    committed = [attempt for attempt in told["rounds"] if attempt["committed"]]
    routes = {attempt["route"] for attempt in committed}
    assert routes - ({"alone"} if alone else set()) == {route}
    together = [attempt for attempt in committed if attempt["route"] != "alone"]
    assert all(attempt["contributors"] == ["w0", "w1"] for attempt in together)
    summary = machines.summary()
    if alone and summary["replicas_identical"] is None:  # one was at its end before the other
        assert summary["replicas_note"].startswith("not comparable: ")
    else:
        assert summary["replicas_identical"] is True
    assert summary["rounds_committed"] == len(committed) >= 4
    assert summary["loss_final"] < summary["loss_first"]


@pytest.mark.parametrize("route", ["relay", "direct"])
@pytest.mark.long("tests/e2e/test_training.py::test_three_commands_train_and_collect_the_results")
def test_diloco_over_a_slow_line_ends_with_equal_replicas(
    machines: TwoMachines, route: str
) -> None:
    machines.gather()
    done = machines.train(machines.job(steps=40, every=10, route=f'"{route}"')).wait(
        timeout_s=PATIENCE_S
    )
    check(machines, done, route=route)
    assert machines.summary()["rounds_aborted"] == 0


@pytest.mark.long(
    "tests/group/test_hub_group.py::test_broken_connection_resumes_with_what_is_missing"
)
def test_a_line_cut_for_some_seconds_costs_time_and_not_the_job(machines: TwoMachines) -> None:
    machines.gather()
    running = machines.train(machines.job(steps=80, every=10))
    until(lambda: list(machines.runs.glob("*/checkpoints/round-*")))
    machines.lab.cut(FAR)
    time.sleep(3.0)  # the length of the break is what is tested
    machines.lab.heal(FAR)
    check(machines, running.wait(), route="relay", alone=True)
