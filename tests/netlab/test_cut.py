"""Four machines on lines as between homes; one line is cut for a while and comes back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import pytest

from atoll.netlab.lab import Lab
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.netlab]

T = TypeVar("T")

HUB, MEMBERS, CUT = 0, 4, 3
"""Hosts 1 to 4 are the members'; `CUT` is the one that loses its line."""

PORT = 7700
CUT_S = 20.0
SILENT_S = 6.0
"""After so much silence rounds go on without a member (the hub's own bound)."""

ROOT = Path(__file__).resolve().parents[2]
SPEC = """
[job]
name = "cut"
nodes = {{min = 1, max = {members}}}
route = "{route}"
[model]
layers = 1
width = 32
heads = 2
context = 32
[data]
corpus = "files:{text}"
[train]
steps = 100000
batch = 4
eval_tokens = 512
schedule = "constant"
[strategy]
preset = "diloco"
every = 25
[checkpoint]
every = 10
"""
SUBMIT = """
import pathlib, sys
from atoll.net.http.client import HubClient
from atoll.net.endpoint import HubEndpoint
client = HubClient(sys.argv[1], sys.argv[2], endpoint=HubEndpoint(ca=sys.argv[3]))
print(client.submit(pathlib.Path(sys.argv[4]).read_text()))
"""
STOP = """
import json, sys, time
from atoll.net.http.client import HubClient
from atoll.net.endpoint import HubEndpoint
client, job = HubClient(sys.argv[1], sys.argv[2], endpoint=HubEndpoint(ca=sys.argv[3])), sys.argv[4]
client.stop(job, grace_s=30.0)
while not client.job(job)["ended"]:
    time.sleep(0.1)
print(json.dumps(client.job(job)))
"""


class Machines:
    """A hub on host 0 and an agent on each of the others."""

    def __init__(
        self, lab: Lab, folder: Path, *, members: int = MEMBERS, spec: str = SPEC, **options: object
    ) -> None:
        """Start everything and submit a job: `spec` with the options."""
        self.lab, self.folder = lab, folder
        self._logs: list[IO[bytes]] = []
        self._started: list[subprocess.Popen[bytes]] = []
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.start_hub()
        for host in range(1, members + 1):
            self.start_agent(host)
        text = folder / "text.txt"
        letters = random.Random(5)
        text.write_text("".join(letters.choices("abcdefgh ", k=60_000)))
        self.spec = spec.format(members=members, text=text, **options)
        (folder / "job.toml").write_text(self.spec)
        self.job = self.ask(SUBMIT, str(folder / "job.toml")).strip()

    def start_hub(self) -> None:
        """Start the hub, or start it again from its file on the same port."""
        data, jobs = self.folder / "data", self.folder / "jobs"
        self.hub = self._start(
            HUB, "hub", "-m", "atoll.hub", "--host", "0.0.0.0", "--port", str(PORT),
            "--advertise", "h0", "--data", str(data), "--jobs", str(jobs),
        )  # fmt: skip
        assert self.hub.stdout is not None
        ready = json.loads(self.hub.stdout.readline())
        self.ticket, self.token, self.ca = ready["ticket"], ready["operator_token"], ready["ca"]

    def start_agent(self, host: int) -> None:
        """Start the agent of a host, or start it again."""
        name = f"n{host}"
        self.agents[name] = self._start(
            host, name, "-m", "atoll.node", "--ticket", self.ticket, "--no-measure",
            "--name", name, "--home", str(self.folder / name),
        )  # fmt: skip

    def _start(self, host: int, name: str, *words: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        popen: subprocess.Popen[bytes] = self.lab.popen(
            host, [sys.executable, *words], cwd=self.folder, env={**os.environ, **own},
            stdout=subprocess.PIPE if host == HUB else subprocess.DEVNULL, stderr=log,
        )  # fmt: skip
        self._started.append(popen)
        return popen

    def close(self) -> None:
        """Close what is open; the lab has ended every process."""
        for popen in self._started:
            popen.wait(PATIENCE_S)
            if popen.stdout is not None:
                popen.stdout.close()
        for log in self._logs:
            log.close()

    def ask(self, code: str, *words: str) -> str:
        """Run a line of Python beside the hub; return what it printed."""
        done: subprocess.CompletedProcess[str] = self.lab.run(
            HUB,
            [sys.executable, "-c", code, f"https://127.0.0.1:{PORT}", self.token, self.ca, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lines(self, name: str, *, since: float = 0.0) -> list[dict[str, Any]]:
        """Return what the hub has written of the job, from a moment on."""
        try:
            text = (self.folder / "jobs" / self.job / name).read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(x) for x in text.splitlines(keepends=True) if x.endswith("\n")]
        return [line for line in lines if line["time"] >= since]

    def contributors(self, *, since: float) -> list[int]:
        """Return how many took part in the rounds that members reported."""
        points = self.lines("metrics.jsonl", since=since)
        return [int(p["values"]["contributors"]) for p in points if "contributors" in p["values"]]

    def cut_member(self) -> str:
        """Return the member that works on the host whose line is cut."""
        assigned = [e for e in self.lines("events.jsonl") if e["kind"] == "assigned"]
        return next(str(e["member"]) for e in assigned if f" n{CUT}" in str(e["text"]))

    def report(self) -> str:
        """Return what happened, for a reader of a failure of this test."""
        return "\n".join(
            f"{e['time'] % 1000:.2f} {e['kind']}: {e['text']}" for e in self.lines("events.jsonl")
        )


@contextlib.contextmanager
def running(folder: Path, *, route: str) -> Iterator[Machines]:
    if reason := Lab.unavailable():
        pytest.skip(f"no network lab here: {reason}")
    with Lab(hosts=MEMBERS + 1, rate="50mbit", rtt="80ms") as lab:
        machines = Machines(lab, folder, route=route)
        try:
            yield machines
        finally:
            lab.stop()
            machines.close()


def until(condition: Callable[[], T], machines: Machines, *, timeout_s: float) -> T:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it did not happen in time:\n{machines.report()}"
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("route", ["auto"])
@pytest.mark.long(
    "tests/group/test_elastic.py::test_frozen_member_delays_no_round_and_learns_of_it"
)
def test_host_cut_off_for_20_s_is_left_out_and_returns(tmp_path: Path, route: str) -> None:
    with running(tmp_path, route=route) as machines:
        until(
            lambda: machines.contributors(since=0.0)[-3:] == [4, 4, 4],
            machines,
            timeout_s=PATIENCE_S,
        )
        victim = machines.cut_member()
        cut = time.time()
        machines.lab.cut(CUT)
        until(lambda: 3 in machines.contributors(since=cut), machines, timeout_s=CUT_S - 1.0)
        without_s = time.time() - cut
        time.sleep(max(0.0, CUT_S - (time.time() - cut)))  # the length of the break is tested
        healed = time.time()
        assert 4 not in machines.contributors(since=cut + without_s), "it was cut off"
        machines.lab.heal(CUT)
        until(lambda: 4 in machines.contributors(since=healed), machines, timeout_s=PATIENCE_S)
        view = json.loads(machines.ask(STOP, machines.job))
        report, events = machines.report(), machines.lines("events.jsonl")
    # Silence, then the patience that follows from measured rounds, then a point per second.
    assert without_s < SILENT_S + 10.0, report
    assert view["state"] == "stopped", report
    results = {member["member"]: member["result"] for member in view["members"]}
    assert len(results) == MEMBERS
    assert len({result["digest"] for result in results.values()}) == 1, results
    recovered = [e for e in events if e["kind"] == "recovered" and e["time"] > healed]
    assert any(event["member"] == victim for event in recovered), report
