"""One process of a job on this machine: started, listened to, ended with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from atoll import config
from atoll.errors import AtollError, ConfigError, from_dict
from atoll.node import parent
from atoll.node.exits import count_oom_kills, explain_exit
from atoll.node.output import LineHandler, read_output
from atoll.wire.messages import Launch

log = logging.getLogger(__name__)

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


@dataclass(slots=True)
class JobProcess:
    """A running process of a job. Make it with :func:`start`."""

    command: Launch
    directory: Path
    process: asyncio.subprocess.Process
    _reading: asyncio.Task[deque[str]]
    _oom_kills: int
    stopping: bool = False

    @property
    def pid(self) -> int:
        """The process id, also the id of its group and session."""
        return self.process.pid

    async def wait(self) -> Exit:
        """Return how it ended, after its last line was read and its whole group is gone."""
        code = await self.process.wait()
        parent.kill_group(self.pid)  # children that it left behind hold the pipe open
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reading), timeout=5.0)
        self._reading.cancel()
        tail = list(self._reading.result()) if _ended_well(self._reading) else []
        error = None if self.stopping else self._explain(code)
        return Exit(code, error, tail)

    async def stop(self, *, grace_s: float) -> None:
        """Ask it to end; kill it and everything it started when it has not after `grace_s`."""
        self.stopping = True
        family = parent.tree(self.pid)
        if not family:
            return
        parent.signal_tree(family[:1], number=signal.SIGTERM)
        try:
            await asyncio.wait_for(asyncio.shield(self.process.wait()), timeout=grace_s)
        except TimeoutError:
            log.info("%s %s did not end in %.1f s: killed", *self.key, grace_s)
        parent.signal_tree([*family, *parent.tree(self.pid)], number=signal.SIGKILL)
        parent.kill_group(self.pid)

    @property
    def key(self) -> tuple[str, str]:
        """Job and member."""
        return self.command.job, self.command.member

    def _explain(self, code: int) -> AtollError | None:
        """Return why it failed: what it wrote down itself, or what its exit status says."""
        if code == 0:
            return None
        with contextlib.suppress(OSError, ValueError):
            return from_dict(json.loads((self.directory / ERROR_FILE).read_text("utf-8")))
        return explain_exit(
            code, member=self.command.member, oom_kills=count_oom_kills() - self._oom_kills
        )


async def start(command: Launch, *, root: Path, hub: str, on_line: LineHandler) -> JobProcess:
    """Start the process that a command asks for.

    Args:
        command: Which member of which job.
        root: Folder of this agent's jobs; the process gets ``root/JOB/MEMBER`` as its own.
        hub: URL of the hub.
        on_line: Called with every line it prints, stdout and stderr together.

    Raises:
        ConfigError: its files cannot be written, or Python cannot be started.
    """
    directory = root / command.job / command.member
    try:
        environment = prepare(command, directory=directory, hub=hub)
        module = "atoll.reducer" if command.member == "reducer" else "atoll.node.worker"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            cwd=directory,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=parent.die_with_parent(),
        )
    except OSError as error:
        raise ConfigError(
            "a process of a job cannot be started",
            given=f"{command.job} {command.member} ({error})",
            remedy="look at the disk and the limits of this machine",
        ) from error
    assert process.stdout is not None
    reading = asyncio.create_task(read_output(process.stdout, directory / "output.log", on_line))
    return JobProcess(command, directory, process, reading, count_oom_kills())


def prepare(command: Launch, *, directory: Path, hub: str) -> dict[str, str]:
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
    )
    return config.child_environment(worker, threads=spec.job.threads)


def _ended_well(task: asyncio.Task[deque[str]]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
