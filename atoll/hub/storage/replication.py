"""Runs the process that copies checkpoints to `[checkpoint] to`.

It is a separate process because object-store drivers block and the hub must not import the
checkpoint package. It records its progress in the job's folder, so it may be killed at any time.
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
from atoll.hub.observability.events import Events
from atoll.hub.tasks import Tasks
from atoll.system import die_with_parent

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "atoll.checkpoint.background.copies")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0


class Replicator:
    """At most one copying process per job."""

    def __init__(
        self,
        *,
        events: Events,
        folder: Callable[[str], Path],
        command: tuple[str, ...] = COMMAND,
    ) -> None:
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
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            preexec_fn=die_with_parent(),
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
            error = str(from_dict(dict(report.get("error") or {})))
            if self._trouble.get(job) != error:
                self._trouble[job] = error
                text = f"the checkpoint of round {round_} is not copied yet: {error}"
                await self._events.add(job, "checkpoint-copy-failed", text)
