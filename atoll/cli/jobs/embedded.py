"""A hub and several nodes on this machine, as child processes of one command.

Everything is in one folder, so that the same hub and nodes can be started again to resume. No
process outlives the command: it ends its children in order, kills those that do not end in time,
and on Linux the kernel kills them if the command itself is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from atoll import system
from atoll.cli.hub_access import KnownHub
from atoll.cli.jobs.interrupts import Interrupts
from atoll.config import TICKET_VARIABLE, extended_environment
from atoll.config.environment import VISIBLE_ACCELERATORS, visible_accelerators
from atoll.errors import AtollError, HubError, StorageFull, from_dict
from atoll.node.machine.probe import Gpus
from atoll.node.processes import process_tree

LAST_OUTPUT_S = 20.0
"""Time to read what a hub has printed before it ended; it is there, unless this machine is busy."""

START_TIMEOUT_S = 120.0
"""Time for the hub to answer: cold disks and busy machines are slow."""

ALONE = ("--host", "127.0.0.1", "--port", "0", "--restart-grace", "5")
"""Options of a hub for the nodes of one command. They end with it, however it ends: a hub that
resumes their job need not wait for them to reconnect, as a hub for other machines does."""

SPEC_FILE = "embedded.json"
"""In a job's folder: which embedded hub it belongs to."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Addresses of an embedded hub that is ready."""

    hub: KnownHub
    ticket: str
    dashboard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Address of a hub that serves other machines too, and the folder of its own node."""

    host: str
    port: int
    advertise: str
    home: Path
    """Folder of the node, which has the machine's own name."""

    @property
    def arguments(self) -> list[str]:
        """Options of the hub."""
        more = ["--advertise", self.advertise] if self.advertise else []
        return ["--host", self.host, "--port", str(self.port), *more]


def accelerators_of(number: int, nodes: int, visible: Sequence[str]) -> list[str]:
    """Return the accelerators of one of several nodes of this machine; empty: it sees all.

    Otherwise every node would compute on the first one.
    """
    if nodes < 2 or len(visible) < 2:
        return []
    return list(visible[number::nodes]) or [visible[number % len(visible)]]


class Interrupted(Exception):
    """A signal came during a wait."""


class Embedded:
    """A hub and `nodes` agents. Call `start`, and always `close`."""

    def __init__(
        self, *, folder: Path, jobs: Path, nodes: int, listening: Listening | None = None
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            folder: Keeps the hub's database, the nodes' identities and all output.
            jobs: The hub's folder of jobs, `runs/`.
            nodes: How many agents, each with one slot.
            listening: None: on loopback, and with nodes of this folder only.
        """
        self._listening = listening
        self._folder, self._jobs = folder, jobs
        self._nodes = nodes
        self._hub: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        """Reads what the hub prints."""
        self._agents: list[subprocess.Popen[bytes]] = []
        self._logs: list[BinaryIO] = []

    # -------------------------------------------------------------------------- starting

    def start(
        self, interrupts: Interrupts, *, prepare: Callable[[str], None] = lambda _: None
    ) -> Ready:
        """Start the hub, then the nodes; returns when the hub answers.

        `prepare` is called with the ticket in between.

        Raises:
            Interrupted: a signal came.
            HubError: the hub did not start; its output is in the message.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._jobs.mkdir(parents=True, exist_ok=True)
        where = self._listening
        arguments = where.arguments if where else ALONE
        arguments = [*arguments, "--data", str(self._folder / "hub"), "--jobs", str(self._jobs)]
        if where is None:  # every job is this person's own
            arguments += ["--copies", self._jobs.resolve().anchor]
        self._hub = self._popen("atoll.hub", arguments, log="hub.log", stdout=subprocess.PIPE)
        ready = self._read_ready(self._hub, interrupts)
        prepare(str(ready["ticket"]))
        for number in range(self._nodes):
            self._agents.append(self._start_node(number, ready["ticket"]))
        url = str(ready["url"])
        token = str(ready["operator_token"])
        known = KnownHub(url, token, operator=True, ca=str(ready["ca"]))
        return Ready(known, ready["ticket"], f"{url}/?token={token}")

    def _start_node(self, number: int, ticket: str) -> subprocess.Popen[bytes]:
        variables = {TICKET_VARIABLE: ticket}
        if self._listening is not None:
            arguments = ["--home", str(self._listening.home)]
        else:
            arguments = ["--home", str(self._folder / f"node{number}")]
            arguments += ["--name", f"node{number}", "--no-measure"]
            own = accelerators_of(number, self._nodes, visible_accelerators(len(Gpus())))
            if own:
                variables[VISIBLE_ACCELERATORS] = ",".join(own)
        return self._popen("atoll.node", arguments, log=f"node{number}.log", variables=variables)

    def _popen(
        self,
        module: str,
        arguments: list[str],
        *,
        log: str,
        stdout: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a Python module in a session of its own, so that Ctrl+C reaches only this process.

        A ticket goes into its environment, because command lines are visible to every user.
        """
        file = (self._folder / log).open("ab")
        self._logs.append(file)
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env=extended_environment(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=stdout if stdout is not None else file,
            stderr=file,
            preexec_fn=system.die_with_parent(),
            **system.apart(),
        )

    def _read_ready(self, hub: subprocess.Popen[bytes], interrupts: Interrupts) -> dict[str, Any]:
        """Return the line that the hub prints when it is ready."""
        lines: deque[bytes] = deque()
        stdout = hub.stdout
        assert stdout is not None

        def read() -> None:
            for line in stdout:  # to the end: a full pipe would stop the hub
                lines.append(line)

        self._reader = threading.Thread(target=read, name="hub-output", daemon=True)
        self._reader.start()
        interrupts.until(
            lambda: bool(lines) or hub.poll() is not None, timeout_s=START_TIMEOUT_S, every_s=0.02
        )
        if interrupts:
            raise Interrupted
        if not lines:  # it has ended, perhaps with an error that was not read yet
            self._reader.join(LAST_OUTPUT_S)
        if not lines:
            raise self._hub_failed()
        ready: dict[str, Any] = json.loads(lines[0])
        if "error" in ready:
            raise from_dict(ready["error"])
        return ready

    def _hub_failed(self) -> AtollError:
        log = self._folder / "hub.log"
        if system.is_full(self._folder):
            return StorageFull(
                "the hub did not start: the disk of this machine has no room",
                given=str(self._folder),
                remedy="free some space, and start again",
            )
        return HubError(
            "the embedded hub did not start",
            given=last_line(log),
            remedy=f"its output is in {log}",
        )

    # ---------------------------------------------------------------------------- health

    def check_hub(self) -> None:
        """Raise when the hub has died.

        Raises:
            HubError: has its last output.
        """
        if self._hub is not None and self._hub.poll() is not None:
            raise HubError(
                "the embedded hub ended during the run",
                given=f"exit status {self._hub.returncode}; {last_line(self._folder / 'hub.log')}",
                remedy=f"its output is in {self._folder / 'hub.log'}; then: atoll resume",
            )

    def ended_node(self) -> str:
        """Return the last output of a node that has ended, or an empty text."""
        for number, agent in enumerate(self._agents):
            if agent.poll() is not None:
                return last_line(self._folder / f"node{number}.log")
        return ""

    def check(self) -> None:
        """Raise when the hub or every node has died.

        Raises:
            HubError: names the process and its last output.
        """
        self.check_hub()
        for number, agent in enumerate(self._agents):
            status = agent.poll()
            if status is not None and all(a.poll() is not None for a in self._agents):
                log = self._folder / f"node{number}.log"
                raise HubError(
                    "every embedded node ended during the run",
                    given=f"exit status {status}; {last_line(log)}",
                    remedy=f"its output is in {log}; then: atoll resume",
                )

    # ---------------------------------------------------------------------------- ending

    def close(self, *, patience_s: float = 2.0) -> None:
        """End the nodes, then the hub; kill those that have not ended after `patience_s` each."""
        _end(self._agents, patience_s=patience_s)
        if self._hub is not None:
            _end([self._hub], patience_s=patience_s)
            if self._reader is not None and self._hub.stdout is not None:
                self._reader.join(patience_s)
                self._hub.stdout.close()
        for file in self._logs:
            file.close()
        self._logs.clear()

    def kill(self) -> None:
        """Kill every child at once; on Linux their children die with them."""
        everything = [*self._agents, *([self._hub] if self._hub is not None else [])]
        for process in everything:
            family = process_tree.tree(process.pid) if process.poll() is None else []
            process_tree.signal_tree(family, number=system.KILL)


def _end(processes: list[subprocess.Popen[bytes]], *, patience_s: float) -> None:
    """Terminate processes, wait for all, then kill the rest with their children."""
    families = {p.pid: process_tree.tree(p.pid) for p in processes if p.poll() is None}
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=max(0.01, deadline - time.monotonic()))
    for process in processes:
        family = [*families.get(process.pid, []), *process_tree.tree(process.pid)]
        if process.poll() is None:
            process_tree.signal_tree(family, number=system.KILL)
            process.wait()
        else:  # its children must not outlive it
            process_tree.signal_tree(family[1:], number=system.KILL)


def is_in_use(data: Path) -> bool:
    """Return whether a hub runs on this data folder: a process holds its lock."""
    path = data / "hub.sqlite.lock"
    if not path.exists():
        return False
    lock = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    try:
        lock.execute("BEGIN IMMEDIATE")
        lock.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        lock.close()
    return False


def last_line(log: Path) -> str:
    """Return the last non-empty line of a log file."""
    with contextlib.suppress(OSError):
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line]
        return lines[-1] if lines else "it printed nothing"
    return "it printed nothing"


def remember_embedded(job_folder: Path, *, folder: Path, nodes: int) -> None:
    """Record in a job's folder which embedded hub can resume it."""
    text = json.dumps({"folder": str(folder.resolve()), "nodes": nodes}, indent=1)
    (job_folder / SPEC_FILE).write_text(text + "\n", encoding="utf-8", newline="\n")


def recall_embedded(job_folder: Path) -> tuple[Path, int] | None:
    """Return the folder and the number of nodes of a job's embedded hub, if it had one."""
    try:
        known = json.loads((job_folder / SPEC_FILE).read_text(encoding="utf-8"))
        return Path(known["folder"]), int(known["nodes"])
    except (OSError, ValueError, KeyError):
        return None
