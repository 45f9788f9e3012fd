"""One process of a job on this machine: started, listened to, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import signal
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from atoll import config
from atoll.errors import AtollError, ConfigError, from_dict
from atoll.net.way import PLAIN, Way
from atoll.node import parent
from atoll.node.exits import count_oom_kills, explain_exit
from atoll.node.output import TAIL_LINES, LineHandler, read_output
from atoll.wire.messages import Launch

log = logging.getLogger(__name__)

T = TypeVar("T")

LAST_LINES_S = 5.0
"""How long the output of a process that has ended is still waited for."""

GONE_S = 5.0
"""How long the end of a process that was killed is waited for."""

PROCESS_FILE = "process.json"
"""Which process works in a folder, for an agent that comes after a crash."""

ERROR_FILE = "error.json"
"""Where a worker leaves its error, in case the hub could not be told."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    code: int
    """Exit status; negative: the signal that killed it."""
    error: AtollError | None
    """None when it ended well or was asked to end."""
    tail: list[str]
    """Last lines it printed."""


class JobProcess:
    """A running process of a job. Make it with :func:`start`, on an event loop."""

    def __init__(
        self,
        command: Launch,
        *,
        directory: Path,
        popen: subprocess.Popen[bytes],
        on_line: LineHandler,
    ) -> None:
        """Listen to a process that has just been started.

        Two threads of its own wait for its output and for its end: the pipe may outlive the
        process when something that it started still holds it.
        """
        self.command = command
        self.directory = directory
        self.stopping = False
        self.leaving = False
        """It was asked to end because this machine goes away, not because its job ends."""
        self.replaced = False
        """A newer process of the same member takes its place."""
        self._popen = popen
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._oom_kills = count_oom_kills()
        loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = loop.create_future()
        self._read_all: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._listen, args=(loop, on_line), daemon=True).start()
        threading.Thread(target=self._await_end, args=(loop,), daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id, also the id of its group and session."""
        return self._popen.pid

    @property
    def key(self) -> tuple[str, str]:
        """Job and member."""
        return self.command.job, self.command.member

    async def wait(self) -> Exit:
        """Return how it ended, after its last line was read and its whole group is gone."""
        code = await asyncio.shield(self._code)
        parent.kill_group(self.pid)  # children that it left behind hold the pipe open
        await asyncio.wait([self._read_all], timeout=LAST_LINES_S)
        return Exit(code, None if self.stopping else self._explain(code), list(self._tail))

    async def stop(self, *, grace_s: float, leaving: bool = False) -> None:
        """Ask it to end; kill it and everything it started when it has not after `grace_s`."""
        self.stopping = True
        self.leaving = self.leaving or leaving
        if self._code.done():
            return
        family = parent.tree(self.pid)
        parent.signal_tree(family[:1], number=signal.SIGTERM)
        parent.wake(family[:1])  # a stopped process hears of it only when it runs again
        await asyncio.wait([self._code], timeout=grace_s)
        if not self._code.done():
            log.info("%s %s did not end in %.1f s: killed", *self.key, grace_s)
            family += parent.tree(self.pid)
        parent.signal_tree(family, number=parent.KILL)
        parent.kill_group(self.pid)

    async def replace(self) -> None:
        """Kill it at once, and wait until it is gone: a newer process takes its place."""
        self.replaced = True
        log.info("%s %s is killed: a newer process takes its place", *self.key)
        await self.stop(grace_s=0.0)
        await asyncio.wait([self._code], timeout=GONE_S)

    def kill(self) -> None:
        """Kill it and everything it started, without waiting."""
        if not self._code.done():
            self.stopping = True
            parent.signal_tree(parent.tree(self.pid), number=parent.KILL)

    def _listen(self, loop: asyncio.AbstractEventLoop, on_line: LineHandler) -> None:
        stdout = cast(io.BufferedReader, self._popen.stdout)
        try:
            with stdout:
                read_output(stdout, self.directory / "output.log", on_line, self._tail)
        finally:
            _tell(loop, self._read_all, None)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        _tell(loop, self._code, self._popen.wait())

    def _explain(self, code: int) -> AtollError | None:
        """Return why it failed: what it wrote down itself, or what its exit status says."""
        if code == 0:
            return None
        with contextlib.suppress(OSError, ValueError):
            return from_dict(json.loads((self.directory / ERROR_FILE).read_text("utf-8")))
        return explain_exit(
            code, member=self.command.member, oom_kills=count_oom_kills() - self._oom_kills
        )


def start(
    command: Launch, *, root: Path, hub: str, way: Way = PLAIN, on_line: LineHandler
) -> JobProcess:
    """Start the process that a command asks for; to be called on the loop of the main thread.

    Args:
        command: Which member of which job.
        root: Folder of this agent's jobs; the process gets ``root/JOB/MEMBER`` as its own.
        hub: URL of the hub.
        way: How it is reached.
        on_line: Called with every line it prints, stdout and stderr together, in another thread.

    Raises:
        ConfigError: its files cannot be written, or Python cannot be started.
    """
    directory = root / command.job / command.member
    module = "atoll.reducer" if command.member == "reducer" else "atoll.node.worker"
    try:
        _end_former(directory)
        environment = prepare(command, directory=directory, hub=hub, way=way)
        popen = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=parent.die_with_parent(),
        )
        _note(directory, popen.pid)
    except OSError as error:
        raise ConfigError(
            "a process of a job cannot be started",
            given=f"{command.job} {command.member} ({error})",
            remedy="look at the disk and the limits of this machine",
        ) from error
    return JobProcess(command, directory=directory, popen=popen, on_line=on_line)


def _note(directory: Path, pid: int) -> None:
    """Write down which process works in a folder; a folder that is full loses the note only."""
    started = parent.started_at(pid)
    if started is not None:
        with contextlib.suppress(OSError):
            text = json.dumps({"pid": pid, "started": started})
            (directory / PROCESS_FILE).write_text(text, encoding="utf-8")


def _end_former(directory: Path) -> None:
    """Kill the process that an agent which crashed may have left in a folder, stopped or not."""
    try:
        former = json.loads((directory / PROCESS_FILE).read_text("utf-8"))
        pid, started = int(former["pid"]), float(former["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if parent.started_at(pid) != started:
        return  # gone; another process may have its number by now
    log.warning("process %d still works in %s: killed", pid, directory)
    family = parent.tree(pid)
    parent.signal_tree(family, number=parent.KILL)
    parent.await_end(family, timeout_s=GONE_S)


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T) -> None:
    """Set a future of the loop from another thread; the loop may be gone already."""

    def tell() -> None:
        if not future.done():
            future.set_result(value)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell)


def prepare(command: Launch, *, directory: Path, hub: str, way: Way = PLAIN) -> dict[str, str]:
    """Write the job file and the user's files; return the environment of the process.

    Raises:
        ConfigError: a file's name would lie outside the folder.
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ERROR_FILE).unlink(missing_ok=True)
    for name, text in command.files.items():
        if Path(name).name != name:
            raise ConfigError(
                "a file of the job has a name that is not plain",
                given=repr(name),
                expected="a file name without a folder",
            )
        (directory / name).write_text(text, encoding="utf-8")
    spec_path = directory / "job.toml"
    spec_path.write_text(command.spec, encoding="utf-8")
    spec = config.parse_spec(command.spec, name=f"the job {command.job}")
    worker = config.WorkerEnvironment(
        hub=hub,
        token=command.token,
        job=command.job,
        member=command.member,
        directory=directory.resolve(),
        spec=spec_path.resolve(),
        ca=way.ca,
        proxy=way.proxy,
    )
    return config.child_environment(worker, threads=spec.job.threads)
