"""A hub and the machines of a fleet, each in a network namespace of its own; real processes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from atoll import system
from atoll.config import LEAST_STEP_VARIABLE, TICKET_VARIABLE, extended_environment
from atoll.errors import HubError
from atoll.fleet.fleet import Fleet, Machine
from atoll.netlab.lab import Lab
from atoll.netlab.shape import Between, Shape
from atoll.node.processes import process_tree

PORT = 7700
PACKAGES = Path(__file__).resolve().parents[2]
"""Where this package is: the processes run the same one."""
START_S = 60.0
CLOSE_S = 5.0
TICK_S = 0.1

Pause = Callable[[float], bool]
"""Waits so many seconds, or less when the user wants to end; returns whether that is so."""


class Site:
    """Starts nothing until `start`; `close` ends all processes, also those that faults stopped."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        """Prepare a site for a fleet whose times and rates are those of this machine."""
        self.fleet, self.folder = fleet, folder
        self._host = {m.name: n for n, m in enumerate(fleet.machines, 1)}
        self._hub_host = self._host.get(fleet.hub.machine, 0)
        self._lab = Lab(hosts=len(fleet) + 1)
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[bytes]] = []
        self._hub: dict[str, Any] = {}

    # ---------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Make hosts and lines, and start the hub.

        Raises:
            LabError: this machine has no network namespaces.
            HubError: the hub did not start.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lab.start()
        fleet = self.fleet
        if not fleet.hub.machine:
            hub = Shape(up_bps=fleet.hub.up_mbps * 1e6, down_bps=fleet.hub.down_mbps * 1e6)
            self._lab.shape(0, hub)
        for machine in fleet.machines:
            self._lab.shape(self._host[machine.name], shape_of(machine))
        for a, b in itertools.combinations(fleet.machines, 2):
            way = between(fleet, a, b)
            if way is not None:
                self._lab.between(self._host[a.name], self._host[b.name], way)
        self._start_hub()

    def close(self) -> None:
        """End every process and remove every namespace. May be called at any time, and again."""
        for name in self._agents:
            self._signal(name, signal.SIGCONT)
        self._lab.stop()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(CLOSE_S)
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()
        self._agents.clear()
        self._started.clear()
        self._logs.clear()

    def _start_hub(self) -> None:
        address = self._lab.address(self._hub_host)
        hub = self._popen(
            self._hub_host, "hub", "-m", "atoll.hub", "--host", "0.0.0.0", "--port", str(PORT),
            "--advertise", address, "--data", str(self.folder / "data"),
            "--jobs", str(self.jobs), output=subprocess.PIPE,
        )  # fmt: skip
        stdout = hub.stdout
        ready = select.select([stdout], (), (), START_S)[0] if stdout is not None else []
        line = stdout.readline() if stdout is not None and ready else b""
        if not line:
            raise HubError(
                "the hub of the rehearsal did not start", given=_last_line(self.folder / "hub.log"),
                remedy=f"its output is in {self.folder / 'hub.log'}",
            )  # fmt: skip
        self._hub = json.loads(line)

    @property
    def jobs(self) -> Path:
        """The hub's folder of jobs."""
        return self.folder / "jobs"

    def check(self) -> None:
        """Raise HubError if the hub has died."""
        hub = self._started[0]
        if hub.poll() is not None:
            raise HubError(
                "the hub of the rehearsal ended", given=_last_line(self.folder / "hub.log"),
                remedy=f"its output is in {self.folder}",
            )  # fmt: skip

    # ----------------------------------------------------------------------------- machines

    def begin(self, name: str) -> None:
        """Start the agent of a machine, or start it again."""
        machine = self.fleet.machine(name)
        variables = {
            TICKET_VARIABLE: str(self._hub["ticket"]), LEAST_STEP_VARIABLE: f"{machine.step_s:.6f}",
        }  # fmt: skip
        self._agents[name] = self._popen(
            self._host[name], name, "-m", "atoll.node", "--no-measure", "--name", name,
            "--home", str(self.folder / name), variables=variables,
        )  # fmt: skip

    def kill(self, name: str) -> None:
        """Kill everything that runs on a machine."""
        self._signal(name, system.KILL)

    def sleep(self, name: str) -> None:
        """Let a machine stand still."""
        self._signal(name, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """Let it go on."""
        self._signal(name, signal.SIGCONT)

    def cut(self, name: str) -> None:
        """Let a machine's line carry nothing."""
        self._lab.cut(self._host[name])

    def heal(self, name: str) -> None:
        """Let it carry everything again."""
        self._lab.heal(self._host[name])

    def _signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a machine's agent and all that it started."""
        process_tree.signal_tree(process_tree.tree(self._agents[name].pid), number=number)

    # ------------------------------------------------------------------------------ the job

    def submit(self, spec: str, *, members: int) -> str:
        """Wait until so many machines have joined, submit a job, and return its id.

        Raises:
            HubError: they have not, or it was refused.
        """
        path = self.folder / "job.toml"
        path.write_text(spec, encoding="utf-8", newline="\n")
        return self._ask("submit", str(members), str(START_S), str(path))

    def stop(self, job: str) -> None:
        """Ask the members to end after their round, for a moment."""
        self._ask("stop", job)

    def _ask(self, *words: str) -> str:
        url = f"https://127.0.0.1:{PORT}"
        command = [sys.executable, "-m", "atoll.rehearse.ask", url, str(self._hub["ca"]), *words]
        done = self._lab.run(
            self._hub_host, command, env=self._environment({}), capture_output=True, text=True,
            input=str(self._hub["operator_token"]), timeout=2 * START_S,
        )  # fmt: skip
        if done.returncode:
            raise HubError(
                f"the rehearsal could not {words[0]} the job",
                given=(done.stderr.strip().splitlines() or ["it said nothing"])[-1],
            )
        return str(done.stdout).strip()

    def lines(self, job: str, name: str, *, after: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return what the hub has written of a job behind a byte, and the byte to go on at."""
        try:
            with (self.jobs / job / name).open("rb") as file:
                file.seek(after)
                text = file.read()
        except FileNotFoundError:
            return [], after
        whole = text[: text.rfind(b"\n") + 1]
        return [json.loads(line) for line in whole.splitlines()], after + len(whole)

    # --------------------------------------------------------------------------- processes

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        known = extended_environment({"PYTHONUNBUFFERED": "1", **variables})
        paths = filter(None, [str(PACKAGES), known.get("PYTHONPATH", "")])
        return {**known, "PYTHONPATH": os.pathsep.join(paths)}

    def _popen(
        self, host: int, name: str, *words: str, output: int = subprocess.DEVNULL,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        log = (self.folder / f"{name}.log").open("ab")
        self._logs.append(log)
        popen: subprocess.Popen[bytes] = self._lab.popen(
            host, [sys.executable, *words], cwd=self.folder,
            env=self._environment(variables or {}), stdin=subprocess.DEVNULL, stdout=output,
            stderr=log, **system.apart(),
        )  # fmt: skip
        self._started.append(popen)
        return popen


def shape_of(machine: Machine) -> Shape:
    """Return a machine's link. The hub has no delay of its own, so the machine has all of it."""
    return Shape(
        up_bps=machine.up_mbps * 1e6, down_bps=machine.down_mbps * 1e6,
        rtt_s=2 * machine.latency_ms / 1000,
    )  # fmt: skip


def between(fleet: Fleet, a: Machine, b: Machine) -> Between | None:
    """Return what two machines are to each other; None: what their links say together."""
    if not fleet.reach_each_other(a, b):
        return Between(apart=True)
    link = fleet.link(a, b)
    site = next((s for s in fleet.sites if s.name == a.site == b.site), None)
    if link is None and (site is None or not site.mbps):
        return None
    path = fleet.between(a, b)
    inside = bool(a.site) and a.site == b.site
    rate_mbps = link.mbps if link is not None else 0.0
    if inside or rate_mbps:
        return Between(bps=path.bytes_per_s * 8, rtt_s=path.round_trip_s, inside=inside)
    return Between(rtt_s=path.round_trip_s)


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
    return "it said nothing"


def wait(pause: Pause, condition: Callable[[], bool], *, timeout_s: float) -> bool:
    """Wait until a condition holds; False: the user wants to end, or time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline or pause(TICK_S):
            return False
    return True
