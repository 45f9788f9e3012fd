"""The agent of a machine: takes commands from its queue, runs processes, tells how they end.

Commands come at least once: the lease of a command runs out when the agent dies before it acked,
and the hub hands it out again. A repeated `Launch` of the same attempt is therefore acked and
otherwise ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, AuthError, DeadlineExceeded, HubError, HubUnreachable
from atoll.net.link import Link
from atoll.net.outbox import Outbox
from atoll.node import launch
from atoll.node.launch import Exit, JobProcess
from atoll.wire.messages import (
    Launch,
    LogLines,
    Message,
    ProcessState,
    QueueAck,
    QueueClaim,
    QueueItem,
    QueueItems,
    Stop,
    unpack_command,
)

log = logging.getLogger(__name__)

LEASE_S = 30.0
WAIT_S = 20.0
"""How long one ask for commands stays open at the hub."""

REPORT_TIMEOUT_S = 600.0
"""How long a report is tried again while the hub is away."""

WAITING_LINES = 20_000
"""Lines of one process that wait while the hub is away; all of them are in its file anyway."""

LEAVE_GRACE_S = 1.5
"""What workers get to end when the agent itself is asked to leave."""


class Agent:
    """Runs the processes that the hub asks this machine for, until told to leave."""

    def __init__(self, link: Link, *, node: str, home: Path, hub: str) -> None:
        """Serve on a link that is connected already.

        Args:
            link: Session of this node.
            node: Its id.
            home: Folder of this agent; jobs get folders under ``home/jobs``.
            hub: URL that workers dial.
        """
        self._link = link
        self._queue = f"node/{node}"
        self._root = home / "jobs"
        self._hub = hub
        self._running: dict[tuple[str, str], JobProcess] = {}
        self._attempts: dict[tuple[str, str], int] = {}
        self._lines: dict[tuple[str, str], Outbox[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> list[str]:
        """The processes that run now, as ``job/member``."""
        return [f"{job}/{member}" for job, member in self._running]

    async def serve(self) -> None:
        """Take commands until cancelled.

        Raises:
            AuthError: the hub no longer knows this node.
        """
        while True:
            try:
                for item in await self._claim():
                    await self._obey(item)
            except AuthError:
                raise
            except (DeadlineExceeded, HubUnreachable):
                continue  # the link reconnects by itself
            except HubError as error:
                log.warning("the hub refused: %s", error)
                await asyncio.sleep(1.0)  # e.g. a lease that another claim took over

    async def leave(self, *, grace_s: float = LEAVE_GRACE_S) -> None:
        """End every process, tell the hub what can be told in that time, stop all tasks."""
        await asyncio.gather(*(p.stop(grace_s=grace_s) for p in self._running.values()))
        pending = [task for task in self._tasks if not task.done()]
        if pending and self._link.connected:
            await asyncio.wait(pending, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(lines.close(timeout_s=0.5) for lines in self._lines.values()))

    async def _claim(self) -> list[QueueItem]:
        ask = QueueClaim(self._queue, lease_s=LEASE_S, limit=1, wait_s=WAIT_S)
        answer = await self._link.request(ask, timeout_s=WAIT_S + 30.0)
        return answer.items if isinstance(answer, QueueItems) else []

    async def _obey(self, item: QueueItem) -> None:
        """Do one command, then ack it; a command that cannot be done is reported, not retried."""
        try:
            command = unpack_command(item.payload)
        except AtollError as error:
            log.error("a command cannot be read: %s", error)
        else:
            if isinstance(command, Launch):
                await self._launch(command)
            else:
                self._stop(command)
        ack = QueueAck(self._queue, item.lease)
        await self._link.request(ack, timeout_s=LEASE_S)

    async def _launch(self, command: Launch) -> None:
        key = (command.job, command.member)
        if self._attempts.get(key, 0) >= command.attempt:
            return  # said before
        self._attempts[key] = command.attempt
        old = self._running.get(key)
        if old is not None:
            await old.stop(grace_s=LEAVE_GRACE_S)
        try:
            process = launch.start(
                command, root=self._root, hub=self._hub, on_line=self._outbox(key).add
            )
        except AtollError as error:
            log.error("%s %s was not started: %s", *key, error)
            self._spawn(
                self._tell(
                    ProcessState(
                        command.job, command.member, "exited", exit_code=1, error=error.to_dict()
                    )
                )
            )
            return
        log.info("%s %s runs as process %d", *key, process.pid)
        self._running[key] = process
        self._spawn(self._supervise(process))

    def _stop(self, command: Stop) -> None:
        process = self._running.get((command.job, command.member))
        if process is not None:
            self._spawn(process.stop(grace_s=command.grace_s))

    async def _supervise(self, process: JobProcess) -> None:
        """Tell the hub that it is there, wait for its end, ship its last lines, tell how it ended.

        It counts as running when it registers, which it says itself.
        """
        job, member = process.key
        started = asyncio.create_task(self._tell(ProcessState(job, member, "starting")))
        ended: Exit = await process.wait()
        await started
        if self._running.get(process.key) is process:
            del self._running[process.key]
        log.info("%s %s ended with %d", job, member, ended.code)
        await self._outbox(process.key).flush(timeout_s=5.0)
        error = ended.error.to_dict() if ended.error is not None else None
        tail = ended.tail if error is not None else []
        await self._tell(
            ProcessState(job, member, "exited", exit_code=ended.code, error=error, tail=tail)
        )

    async def _tell(self, body: Message) -> None:
        try:
            await self._link.request(body, timeout_s=REPORT_TIMEOUT_S)
        except AtollError as error:
            log.warning("the hub was not told %s: %s", body, error)

    def _outbox(self, key: tuple[str, str]) -> Outbox[str]:
        """Return where lines of a member go; one for all its attempts, so that numbers go on."""
        if key not in self._lines:
            job, member = key
            self._lines[key] = Outbox(
                self._link,
                lambda seq, lines: LogLines(job, member, seq, lines),
                capacity=WAITING_LINES,
            )
            self._lines[key].start()
        return self._lines[key]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the agent failed", exc_info=task.exception())
