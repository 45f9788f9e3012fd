"""Programs as children of the agent, ended with everything they started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import os
import platform
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from typing import cast

from atoll import config, system
from atoll.errors import AtollError, ConfigError, JobError
from atoll.ids import is_reducer
from atoll.node.launchers.hub_network import HubForwarder
from atoll.node.launchers.launcher import GONE_S, OOM_SCORE, Exit, Order
from atoll.node.launchers.sandbox import Confinement, temporary
from atoll.node.launchers.threads import tell
from atoll.node.processes import process_tree
from atoll.node.processes.exits import ERROR_FILE, explain_exit, read_error
from atoll.node.processes.output import TAIL_LINES, LineHandler, read_output

log = logging.getLogger(__name__)

LAST_LINES_S = 5.0
"""How long to wait for the output of an ended process."""

_NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.E2BIG)


def process_file(directory: Path) -> Path:
    """Return the file that names the process in a folder, for an agent restarted after a crash.

    It is beside the folder: the program in it must not choose which process is killed.
    """
    return directory.with_name(f"{directory.name}.process.json")


class ProcessLauncher:
    """Starts programs as children, each in its own session and process group."""

    async def start(self, order: Order, on_line: LineHandler) -> ChildProcess:
        """Start a program; call it on the loop of the main thread.

        Raises:
            ConfigError: the program does not exist.
            JobError: the machine cannot start it.
        """
        await asyncio.to_thread(_end_former, order.directory)
        words = argv(order)
        environment = _environment(order)
        before = system.before_program(
            niceness=order.caps.nice, cpus=order.caps.cpus or (), oom_score=OOM_SCORE
        )
        apart: Confinement | None = None
        forwarder: HubForwarder | None = None

        def prepare() -> None:
            if before is not None:
                before()
            if apart is not None:
                apart.enter()

        try:
            if order.sandbox is not None:
                apart = await asyncio.to_thread(Confinement, order, order.sandbox)
            popen = subprocess.Popen(
                words,
                cwd=order.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                preexec_fn=prepare if before is not None else None,
                **system.apart(),
            )
            try:
                forwarder = apart.serve() if apart is not None else None
            except OSError:
                system.kill_group(popen.pid)
                popen.communicate()
                raise
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            raise _not_started(words[0], error) from error
        finally:
            if apart is not None:
                apart.close()
        _note(order.directory, popen.pid)
        return ChildProcess(order, popen=popen, on_line=on_line, forwarder=forwarder)


class ChildProcess:
    """A running child, created by :class:`ProcessLauncher` on an event loop."""

    def __init__(
        self, order: Order, *, popen: subprocess.Popen[bytes], on_line: LineHandler,
        forwarder: HubForwarder | None = None,
    ) -> None:  # fmt: skip
        """Monitor a process that has just started; `forwarder` is closed at its exit.

        Two threads wait for its output and for its exit, because its descendants may hold the pipe
        open after its exit.
        """
        self._order = order
        self._popen, self._forwarder = popen, forwarder
        self._failure: AtollError | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._oom_kills = system.count_oom_kills()
        loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = loop.create_future()
        self._read_all: asyncio.Future[None] = loop.create_future()
        threading.Thread(target=self._listen, args=(loop, on_line), daemon=True).start()
        threading.Thread(target=self._await_end, args=(loop,), daemon=True).start()

    @property
    def name(self) -> str:
        """Its name on this machine."""
        return f"process {self.pid}"

    @property
    def pid(self) -> int:
        """The process id, also the id of its group and session."""
        return self._popen.pid

    @property
    def child(self) -> bool:
        """True: the agent reaps it."""
        return True

    async def wait(self) -> Exit:
        """Return its exit, after its last line was read and its whole group is gone."""
        code = await asyncio.shield(self._code)
        system.kill_group(self.pid)  # its children would hold the pipe open
        await asyncio.wait([self._read_all], timeout=LAST_LINES_S)
        return Exit(code, self._failure or self._explain(code), list(self._tail))

    async def stop(self, *, grace_s: float) -> None:
        """Ask it to end; kill it and everything it started after `grace_s`."""
        if self._code.done():
            return
        family = process_tree.tree(self.pid)
        process_tree.signal_tree(family[:1], number=signal.SIGTERM)
        process_tree.wake(family[:1])  # a stopped process reacts only when it is continued
        await asyncio.wait([self._code], timeout=grace_s)
        if not self._code.done():
            log.info("%s %s did not end in %.1f s: killed", *self._order.key, grace_s)
            family += process_tree.tree(self.pid)
        process_tree.signal_tree(family, number=system.KILL)
        system.kill_group(self.pid)
        await asyncio.wait([self._code], timeout=GONE_S)

    def kill(self) -> None:
        """Kill it and everything it started, without waiting."""
        if not self._code.done():
            process_tree.signal_tree(process_tree.tree(self.pid), number=system.KILL)

    def fail(self, error: AtollError) -> None:
        """Kill it because of an error, which `wait` then returns."""
        if not self._code.done():
            self._failure = error
            self.kill()

    def _listen(self, loop: asyncio.AbstractEventLoop, on_line: LineHandler) -> None:
        stdout = cast(io.BufferedReader, self._popen.stdout)
        try:
            with stdout:
                path = self._order.directory / "output.log"
                read_output(stdout, path, on_line, self._tail, hide=self._order.hide)
        finally:
            tell(loop, self._read_all, None)

    def _await_end(self, loop: asyncio.AbstractEventLoop) -> None:
        code = self._popen.wait()
        if self._forwarder is not None:
            self._forwarder.close()
        tell(loop, self._code, code)

    def _explain(self, code: int) -> AtollError | None:
        if code == 0:
            return None
        return explain(self._order, code, oom_kills=system.count_oom_kills() - self._oom_kills)


def explain(order: Order, code: int, *, oom_kills: int) -> AtollError:
    """Return why a program failed, from its error file or its exit status."""
    if (error := read_error(order.directory / ERROR_FILE)) is not None:
        return error
    member, program = order.command.member, ""
    if not is_reducer(member) and order.spec.kind in ("command", "container"):
        program = (order.spec.job.command or [order.spec.launch.image])[0]
    return explain_exit(code, member=member, oom_kills=oom_kills, program=program)


def argv(order: Order) -> list[str]:
    """Return the command line of an order's program; it is run without a shell.

    With -P a file of the job, e.g. `msgspec.py`, does not take the place of a module of ours.
    """
    job = order.spec.job
    if is_reducer(order.command.member):
        return [str(order.python), "-P", "-m", "atoll.reducer"]
    if job.command:
        return [*job.command, *job.args]
    return [str(order.python), "-P", "-m", "atoll.node.worker"]


def _not_started(
    program: str, error: OSError | ValueError | subprocess.SubprocessError
) -> ConfigError | JobError:
    """Return the error of a program that did not start: the job's fault, or the machine's."""
    unusable = isinstance(error, OSError) and error.errno in _NO_PROGRAM
    if unusable or isinstance(error, ValueError):
        return ConfigError(
            "a program of a job cannot be started",
            given=f"{program} ({error})",
            expected="a program on the machine or in the job's code",
            remedy="look at [job] command",
        )
    return JobError(
        "a machine cannot start a program",
        given=f"{program} on {platform.node()} ({error})",
        remedy="look at the memory, the disk and the limits of that machine",
    )


def _environment(order: Order) -> dict[str, str]:
    """Return the whole environment of a child: the agent's and the order's.

    The folder of its Python comes first in PATH, so that `python` is the job's own.
    """
    environment = config.extended_environment(order.environment)
    if order.spec.kind == "rl":
        environment = {**config.NO_DISPLAY, **environment}
    if "PATH" not in order.environment:
        paths = [str(order.python.parent), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(paths)
    if str(order.python) != sys.executable:
        environment["VIRTUAL_ENV"] = str(order.python.parent.parent)
    if order.sandbox is not None:
        environment["TMPDIR"] = str(temporary(order))
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(temporary(order) / "torchinductor"))
    caps = order.caps
    own = "CUDA_VISIBLE_DEVICES" in order.environment and not caps.gpus_by_owner
    if caps.gpus is not None and not own:
        visible = config.extended_environment({}).get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in visible.split(",") if name]
        chosen = [names[gpu] if gpu < len(names) else str(gpu) for gpu in caps.gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    return environment


def _note(directory: Path, pid: int) -> None:
    """Record which process works in a folder; ignored if the disk is full."""
    started = process_tree.started_at(pid)
    if started is not None:
        with contextlib.suppress(OSError):
            text = json.dumps({"pid": pid, "started": started})
            process_file(directory).write_text(text, encoding="utf-8", newline="\n")


def _end_former(directory: Path) -> None:
    """Kill a process that a crashed agent may have left in a folder."""
    try:
        former = json.loads(process_file(directory).read_text("utf-8"))
        pid, started = int(former["pid"]), float(former["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return
    if process_tree.started_at(pid) != started:
        return  # gone; its process id may have been reused
    log.warning("process %d still works in %s: killed", pid, directory)
    family = process_tree.tree(pid)
    process_tree.signal_tree(family, number=system.KILL)
    process_tree.await_end(family, timeout_s=GONE_S)
