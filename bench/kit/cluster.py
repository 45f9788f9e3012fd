"""A real hub and real node agents as processes of this machine, for benchmarks with faults.

with Cluster(folder) as cluster:
    cluster.start_hub()
    cluster.start_node("n0")
    job = cluster.client.submit(spec)
    cluster.worker("w0").kill()
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil

from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
from atoll.node.availability.policy import FILE as POLICY_FILE
from atoll.system import die_with_parent
from bench.kit.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
READY_S = 60.0
MARK = "ATOLL_BENCH"
"""Variable in the environment of everything that a cluster starts, directly or not."""


class Cluster:
    """A hub, its nodes and whatever they start; all of it is killed at the end of the block.

    On Linux it also dies with the thread that started it, so use one from the main thread.
    """

    def __init__(self, folder: Path, *, hub_options: Sequence[str] = ()) -> None:
        """Keep everything under a folder; nothing runs yet. `hub_options`: of `atoll.hub`."""
        self.folder = folder
        self._hub_options = hub_options
        self.hub_environment: dict[str, str] = {}
        """Further variables of the hub."""
        self.jobs = folder / "jobs"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ticket = ""
        self.token = ""
        """An operator's; the hub keeps it over its restarts."""
        self.ca = ""
        """PEM file of the hub's authority; empty: it speaks plain HTTP."""
        self.hub: subprocess.Popen[str] | None = None
        self.nodes: dict[str, subprocess.Popen[str]] = {}
        self._mark = secrets.token_hex(8)
        self._client: HubClient | None = None
        self._logs: list[IO[str]] = []
        folder.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------------------- life, death

    def start_hub(self) -> None:
        """Start the hub, or start it again from its file on the same port."""
        command = [
            *(sys.executable, "-m", "atoll.hub", "--port", str(self.port)),
            *("--data", str(self.folder / "hub"), "--jobs", str(self.jobs)),
            *self._hub_options,
        ]
        self.hub = self._start(command, "hub", self.hub_environment)
        ready = json.loads(_first_line(self.hub))
        self.ticket, self.token = ready["ticket"], ready["operator_token"]
        self.ca = ready["ca"]
        self.url = f"{'https' if self.ca else 'http'}://127.0.0.1:{self.port}"
        if self._client is not None:
            self._client.close()
        self._client = HubClient(self.url, self.token, endpoint=HubEndpoint(ca=self.ca))

    def start_node(
        self,
        name: str,
        *,
        slots: int = 1,
        ticket: str = "",
        measure: bool = False,
        policy: str = "",
    ) -> None:
        """Start an agent, or the same one again from what it knows of itself.

        Args:
            name: Of the node.
            slots: Workers that it takes at once.
            ticket: Where it finds the hub, if that is not the hub's own address.
            measure: Whether it tries its device at the start.
            policy: The owner's, as TOML.
        """
        home = self.folder / "nodes" / name
        if policy:
            home.mkdir(parents=True, exist_ok=True)
            (home / POLICY_FILE).write_text(policy, encoding="utf-8")
        command = [
            *(sys.executable, "-m", "atoll.node", "--name", name),
            *([] if measure else ["--no-measure"]),
            *("--ticket", ticket or self.ticket, "--slots", str(slots)),
            *("--home", str(home)),
        ]
        self.nodes[name] = self._start(command, name)

    def _start(
        self, command: list[str], name: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        log = (self.folder / f"{name}.log").open("a", encoding="utf-8")
        self._logs.append(log)
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env={**self._environment(), **(environment or {})},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )

    def _environment(self) -> dict[str, str]:
        """Return an environment in which workers find this package."""
        places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
        own = {
            MARK: self._mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places),
        }  # fmt: skip
        return {**os.environ, **own, "ATOLL_HOME": str(self.folder / "home")}

    def close(self) -> None:
        """Kill everything, also what is stopped."""
        if self._client is not None:
            self._client.close()
        started = [*self.nodes.values(), *([self.hub] if self.hub is not None else [])]
        while found := self.processes():
            for process in found:
                _signal(process, signal.SIGKILL)
            psutil.wait_procs(found, timeout=1.0)
        for popen in started:
            popen.wait()
            if popen.stdout is not None:
                popen.stdout.close()
        for log in self._logs:
            log.close()

    def __enter__(self) -> Self:
        """End everything at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------------ what is there

    @property
    def client(self) -> HubClient:
        """An operator's client of the hub."""
        if self._client is None:
            raise RuntimeError("the hub was not started")
        return self._client

    def processes(self) -> list[psutil.Process]:
        """Return everything that runs with this cluster's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.environ().get(MARK) == self._mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def workers(self) -> dict[str, psutil.Process]:
        """Return the running workers by member."""
        return self._of_module("atoll.node.worker")

    def reducers(self) -> list[psutil.Process]:
        """Return the running reducers."""
        return list(self._of_module("atoll.reducer").values())

    def _of_module(self, module: str) -> dict[str, psutil.Process]:
        found = {}
        for process in self.processes():
            try:
                if module in process.cmdline():
                    found[process.environ()["ATOLL_MEMBER"]] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied, KeyError):
                continue
        return found

    def wait_for_nodes(self, count: int) -> None:
        """Wait until so many nodes are connected.

        Raises:
            TimeoutError: they do not come.
        """
        deadline = time.monotonic() + READY_S
        while sum(node["state"] == "online" for node in self.client.nodes()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{count} nodes do not come: {self.client.nodes()}")
            time.sleep(0.1)

    def lines(self, job: str, name: str) -> list[dict[str, Any]]:
        """Return what the hub has written about a job, e.g. to `events.jsonl`."""
        try:
            text = (self.jobs / job / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1:] == "\n"]


def _first_line(popen: subprocess.Popen[str]) -> str:
    """Return the first line of a process.

    Raises:
        TimeoutError: it says nothing, or has ended.
    """
    if popen.stdout is None:
        raise RuntimeError("the process has no output")
    ready, _, _ = select.select([popen.stdout], (), (), READY_S)
    line = popen.stdout.readline() if ready else ""
    if not line:
        raise TimeoutError(f"process {popen.pid} did not start: see its log")
    return line


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return
