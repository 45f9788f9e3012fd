"""Runs the reducers of jobs: beside the hub where torch is installed, else on a node.

The hub itself never imports torch: a reducer is a separate process, restarted when it ends
and ended with the hub (by the kernel on Linux; elsewhere it exits when its link stays down).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import importlib.util
import logging
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from atoll.config import WorkerEnvironment, child_environment
from atoll.errors import AtollError
from atoll.hub.stores import Stores
from atoll.hub.tasks import Tasks
from atoll.ids import REDUCER, new_suffix
from atoll.system import die_with_parent

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "atoll.reducer")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 60.0
"""A process that lived this long is restarted without a long pause."""

GRACE_S = 0.5
LINES_AT_ONCE = 100
READ_BYTES = 16_384


def torch_is_here() -> bool:
    """Return whether torch can be imported, without importing it."""
    return importlib.util.find_spec("torch") is not None


class ReducerProcesses:
    """Reducer processes of jobs: one for each that needs it, or several parameter servers."""

    def __init__(
        self,
        *,
        stores: Stores,
        tasks: Tasks,
        url: Callable[[], str],
        ca: Callable[[], str] = str,
        folder: Path,
    ) -> None:
        """Start reducers that dial `url()`, trust `ca()` and live in subfolders of `folder`."""
        self._stores = stores
        self._tasks = tasks
        self._url = url
        self._ca = ca
        self._folder = folder
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self.ended: Callable[[str, str], None] = lambda job, reducer: None
        """Called with job and reducer name when its process has ended."""

    def start(self, job: str, reducer: str = REDUCER) -> None:
        """Keep a reducer for a job running until :meth:`stop`."""
        key = (job, reducer)
        if key not in self._running:
            self._running[key] = self._tasks.start(self._keep(*key), name=f"{reducer} of {job}")

    async def stop(self, job: str) -> None:
        """End a job's reducers, if there are any."""
        tasks = [self._running.pop(key) for key in list(self._running) if key[0] == job]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """End every reducer."""
        await asyncio.gather(*(self.stop(job) for job in {job for job, _ in self._running}))

    async def _keep(self, job: str, reducer: str) -> None:
        """Restart the process whenever it ends, with growing pauses."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            began = loop.time()
            try:
                code = await self._run(job, reducer)
                self.ended(job, reducer)
                text = f"the {reducer} ended with exit status {code}"
                await self._stores.events.add(job, "reducer-ended", text)
            except (AtollError, OSError) as error:  # e.g. a full disk, which may be temporary
                logger.error("the %s of %s: %s", reducer, job, error)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            if loop.time() - began > STEADY_S:
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)

    async def _run(self, job: str, reducer: str) -> int:
        """Run the process once; return its exit status."""
        folder = self._folder / job
        if reducer != REDUCER:
            folder = folder / reducer
        folder.mkdir(parents=True, exist_ok=True)
        environment = child_environment(
            WorkerEnvironment(
                hub=self._url(),
                token=await self._stores.auth.issue_job_token(job),
                job=job,
                member=reducer,
                directory=folder,
                spec=self._stores.jobs.folder(job) / "job.toml",
                ca=self._ca(),
            ),
            threads=1,
        )
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=die_with_parent(),
        )
        try:
            await self._ship_lines(job, reducer, process)
            return await process.wait()
        finally:
            await _end(process)

    async def _ship_lines(self, job: str, name: str, process: asyncio.subprocess.Process) -> None:
        """Add the process's output to the job's log until it closes its output."""
        source, seq = new_suffix(), 1
        assert process.stdout is not None
        async for lines in output_lines(process.stdout):
            await self._stores.logs.add(job, name, source=source, seq=seq, lines=lines)
            seq += len(lines)


async def output_lines(output: asyncio.StreamReader) -> AsyncIterator[list[str]]:
    """Yield whole lines, at most `LINES_AT_ONCE` together; very long ones are cut."""
    decoder, rest, chunk = codecs.getincrementaldecoder("utf-8")("replace"), "", b"-"
    while chunk:
        chunk = await output.read(READ_BYTES)
        *lines, rest = (rest + decoder.decode(chunk, final=not chunk)).split("\n")
        if rest and (not chunk or len(rest) >= READ_BYTES):
            lines, rest = [*lines, rest], ""
        for first in range(0, len(lines), LINES_AT_ONCE):
            yield [line.rstrip("\r") for line in lines[first : first + LINES_AT_ONCE]]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask a process to exit, then kill it."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
        try:
            async with asyncio.timeout(GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
