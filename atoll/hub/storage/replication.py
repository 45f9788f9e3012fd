"""Runs the process that copies checkpoints to `[checkpoint] to`.

It is a separate process because object-store drivers block and the hub must not import the
checkpoint package. It records its progress in the job's folder, so it may be killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import AtollError, from_dict
from atoll.hub.observability.events import Events
from atoll.hub.tasks import Tasks
from atoll.system import die_with_parent

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "atoll.checkpoint.background.copies")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


@dataclass(frozen=True, slots=True)
class Access:
    """How the target of a job's copies is opened."""

    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of its fsspec driver."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> value of the secrets among the options, to redact them in messages."""


async def _without_options(job: str) -> Access:
    """Default: the driver reads its options from the hub's environment."""
    return Access()


class Replicator:
    """At most one copying process per job."""

    def __init__(
        self,
        *,
        events: Events,
        folder: Callable[[str], Path],
        command: tuple[str, ...] = COMMAND,
        access: Callable[[str], Awaitable[Access]] = _without_options,
    ) -> None:
        """Copy from `folder(job)`; `access(job)` is asked before every start of the process."""
        self._access = access
        self._events = events
        self._folder = folder
        self._command = command
        self._tasks = Tasks()
        self._again: dict[str, str] = {}
        self._running: set[str] = set()
        self._of_job: dict[str, asyncio.Task[Any]] = {}
        self._trouble: dict[str, str] = {}

    def wake(self, job: str, url: str) -> None:
        """Start copying all complete checkpoints that are not copied yet; returns at once."""
        self._again[job] = url
        if job not in self._running:
            self._running.add(job)
            task = self._tasks.start(self._keep(job), name=f"copies of {job}")
            self._of_job[job] = task

    async def forget(self, job: str) -> None:
        """Stop copying for a deleted job; existing copies stay."""
        self._again.pop(job, None)
        task = self._of_job.pop(job, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._running.discard(job)  # a task that had not begun does not do it itself
        self._trouble.pop(job, None)

    async def close(self) -> None:
        """Stop every process; the rest is copied after the next `wake`."""
        await self._tasks.close()

    async def _keep(self, job: str) -> None:
        """Run the process while there is something new, with increasing pauses after failures."""
        pause_s = FIRST_PAUSE_S
        try:
            while job in self._again:
                url = self._again.pop(job)
                if await self._try(job, url) == 0:
                    pause_s = FIRST_PAUSE_S
                    continue
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._again.setdefault(job, url)
        finally:
            self._running.discard(job)
            self._of_job.pop(job, None)

    async def _try(self, job: str, url: str) -> int:
        try:
            return await self._run(job, url, await self._access(job))
        except (AtollError, OSError) as error:  # OSError: the process was not started, or is gone
            await self._failed(job, str(error))
            return 1

    async def _run(self, job: str, url: str, access: Access) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            task = {
                "folder": str(self._folder(job).resolve()), "url": url, "job": job,
                "options": access.options, "secrets": access.secrets,
            }  # fmt: skip
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            await process.stdin.drain()
            while (line := await _line(process.stdout)) is not None:
                await self._tell(job, line)
            return await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _tell(self, job: str, line: bytes) -> None:
        """Turn a report into an event; a repeated failure is reported once."""
        try:
            report: dict[str, Any] = msgspec.json.decode(line, type=dict[str, Any])
            kind, round_ = str(report.get("type", "")), report.get("round")
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        if kind == "Copied":
            self._trouble.pop(job, None)
            text = f"the checkpoint of round {round_} is copied ({report.get('nbytes')} bytes)"
            await self._events.add(job, "checkpoint-copied", text)
        elif kind == "CopyFailed":
            await self._failed(job, str(from_dict(dict(report.get("error") or {}))), round_)

    async def _failed(self, job: str, error: str, round_: object = None) -> None:
        if self._trouble.get(job) != error:
            self._trouble[job] = error
            what = "checkpoints are" if round_ is None else f"the checkpoint of round {round_} is"
            await self._events.add(job, "checkpoint-copy-failed", f"{what} not copied yet: {error}")


async def _line(source: asyncio.StreamReader) -> bytes | None:
    """Return the next line, empty if it is too long to be a report; None: there is none."""
    try:
        return await source.readline() or None
    except ValueError:
        return b""
