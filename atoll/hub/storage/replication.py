"""Runs the program that copies checkpoints to where `[checkpoint] to` says, beside the hub.

It is a process of its own because drivers of object stores block, and because the hub imports
nothing of checkpoints. It notes what it has copied in the job's folder, so it can be killed at any
time and started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from atoll.errors import from_dict
from atoll.hub.child_process import death_with_parent
from atoll.hub.observability.events import Events
from atoll.hub.tasks import Tasks

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "atoll.checkpoint.background.copies")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


class Replicator:
    """At most one copying process for each job."""

    def __init__(
        self,
        *,
        events: Events,
        folder: Callable[[str], Path],
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """`folder` gives a job's folder."""
        self._events = events
        self._folder = folder
        self._command = command
        self._tasks = Tasks()
        self._again: dict[str, str] = {}
        self._running: set[str] = set()
        self._of_job: dict[str, asyncio.Task[Any]] = {}
        self._trouble: dict[str, str] = {}

    def wake(self, job: str, url: str) -> None:
        """Copy whatever of a job is complete and not copied yet; returns at once."""
        self._again[job] = url
        if job not in self._running:
            self._running.add(job)
            task = self._tasks.start(self._keep(job), name=f"copies of {job}")
            self._of_job[job] = task

    async def forget(self, job: str) -> None:
        """End the copying of a job that is deleted; what was copied stays where it is."""
        self._again.pop(job, None)
        task = self._of_job.pop(job, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._trouble.pop(job, None)

    async def close(self) -> None:
        """End every process; what is missing is copied after the next `wake`."""
        await self._tasks.close()

    async def _keep(self, job: str) -> None:
        """Run the process as often as something new is complete, and again when it failed."""
        pause_s = FIRST_PAUSE_S
        try:
            while job in self._again:
                url = self._again.pop(job)
                if await self._run(job, url) == 0:
                    pause_s = FIRST_PAUSE_S
                    continue
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                self._again.setdefault(job, url)
        finally:
            self._running.discard(job)
            self._of_job.pop(job, None)

    async def _run(self, job: str, url: str) -> int:
        """Run the process once; return its exit status."""
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=death_with_parent(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            task = {"folder": str(self._folder(job).resolve()), "url": url, "job": job}
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            await process.stdin.drain()
            async for line in process.stdout:
                await self._tell(job, line)
            return await process.wait()
        except OSError as error:
            logger.warning("copies of %s: %s", job, error)
            return 1
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _tell(self, job: str, line: bytes) -> None:
        """Make an event of a report; the same trouble is told once."""
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
            error = str(from_dict(dict(report.get("error") or {})))
            if self._trouble.get(job) != error:
                self._trouble[job] = error
                text = f"the checkpoint of round {round_} is not copied yet: {error}"
                await self._events.add(job, "checkpoint-copy-failed", text)
