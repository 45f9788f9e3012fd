"""The agent of a machine: takes commands from its queue, runs processes, tells how they end.

Commands come at least once: the lease of a command runs out when the machine sleeps or the agent
dies before it acked, and the hub hands the command out again. Every launch has a token of its own,
so one that comes again is recognised by it, acked, and otherwise ignored.

At most one process of a member runs here: an older one is killed before the next is started, also
one that is stopped (SIGSTOP) and so would not hear that it is to end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from atoll.errors import (
    AtollError,
    AuthError,
    ConfigError,
    DeadlineExceeded,
    HubUnreachable,
    WireError,
)
from atoll.net.link import Link
from atoll.net.retry import backoff
from atoll.net.way import PLAIN, Way
from atoll.node import launch
from atoll.node.launch import Exit, JobProcess
from atoll.node.shipping import Key, LineShipping
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import (
    Drain,
    Launch,
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

ANSWER_TIMEOUT_S = 60.0
"""How long one report waits for its answer before it is made anew."""

LEAVE_GRACE_S = 5.0
"""What workers get to finish or abandon their round when the machine goes away."""

LAST_REPORTS_S = 1.0
"""What the last reports get when the agent ends."""

KNOWN_LAUNCHES = 8
"""Launches per member that are recognised when they come again."""

_REFUSALS = (AuthError, ConfigError, WireError)
"""Answers to a report that sending it again cannot change."""


class Agent:
    """Runs the processes that the hub asks this machine for, until told to leave."""

    def __init__(self, link: Link, *, node: str, home: Path, hub: str, way: Way = PLAIN) -> None:
        """Serve on a link that is connected already.

        Args:
            link: Session of this node.
            node: Its id.
            home: Folder of this agent; jobs get folders under ``home/jobs``.
            hub: URL that workers dial.
            way: How they reach it.
        """
        self._link = link
        self._queue = f"node/{node}"
        self._root = home / "jobs"
        self._hub = hub
        self._way = way
        self._running: dict[Key, JobProcess] = {}
        self._processes: set[JobProcess] = set()
        """All that have not ended, also those whose place a newer one has taken."""
        self._launched: dict[Key, deque[str]] = {}
        self._lines = LineShipping(link)
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining: dict[str, str] = {}
        """Who wants this machine drained, and why; nobody: it takes work."""
        link.on_notice(self._noticed)
        link.on_reconnect(self._reconnected)

    @property
    def running(self) -> list[str]:
        """The processes that run now, as ``job/member``."""
        return [f"{job}/{member}" for job, member in self._running]

    @property
    def children(self) -> set[int]:
        """Process ids of every process that has not been seen to end."""
        return {process.pid for process in self._processes}

    @property
    def draining(self) -> str:
        """Why this machine takes no work now; empty: it does."""
        return next(iter(self._draining.values()), "")

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
            except AtollError as error:
                log.warning("the hub refused: %s", error)
                await asyncio.sleep(1.0)  # e.g. a lease that ended, or the hub's disk is full

    # --------------------------------------------------------------------------- going away

    async def drain(self, reason: str, *, source: str) -> None:
        """Take no more work, and have every process leave its round and end within 5 s.

        Args:
            reason: For people.
            source: Who asks; the machine takes work again when nobody asks any more.
        """
        news = self._draining.get(source) != reason
        self._draining[source] = reason
        if news:
            log.info("takes no more work: %s", reason)
            self._spawn(self._tell(Drain(draining=True, reason=reason)))
        await self._end_all(LEAVE_GRACE_S)

    async def undrain(self, *, source: str) -> None:
        """Take work again, unless somebody else still wants the machine drained."""
        if self._draining.pop(source, None) is not None and not self._draining:
            log.info("takes work again")
            await self._tell(Drain(draining=False))

    async def leave(self, *, reason: str = "the node leaves", grace_s: float | None = None) -> None:
        """End every process, tell the hub what can be told in that time, stop all tasks."""
        self._draining.setdefault("leave", reason)
        if self._link.connected:
            self._spawn(self._tell(Drain(draining=True, reason=reason)))
        await self._end_all(LEAVE_GRACE_S if grace_s is None else grace_s)
        pending = [task for task in self._tasks if not task.done()]
        if pending and self._link.connected:
            await asyncio.wait(pending, timeout=LAST_REPORTS_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._lines.close(timeout_s=0.5)

    def kill_all(self) -> None:
        """Kill every process now, e.g. because a person has asked twice."""
        for process in self._processes:
            process.kill()

    async def _end_all(self, grace_s: float) -> None:
        processes = list(self._running.values())
        await asyncio.gather(*(p.stop(grace_s=grace_s, leaving=True) for p in processes))

    def _noticed(self, body: Message) -> None:
        """Hear from the hub that a person wants this machine drained, or not any more."""
        if not isinstance(body, Drain):
            return
        if body.draining:
            reason = body.reason or "a person asked for it"
            self._spawn(self.drain(reason, source="person"))
        else:
            self._spawn(self.undrain(source="person"))

    def _reconnected(self) -> None:
        if self._draining:  # the hub may be another process now
            self._spawn(self._tell(Drain(draining=True, reason=self.draining)))

    # ----------------------------------------------------------------------------- commands

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
        launched = self._launched.setdefault(key, deque(maxlen=KNOWN_LAUNCHES))
        if command.token in launched:
            return  # said before
        launched.append(command.token)
        if self._draining:
            log.info("%s %s is not started: %s", *key, self.draining)
            self._report(command, "exited", exit_code=EXIT_LEFT)
            return
        old = self._running.get(key)
        if old is not None:
            await old.replace()
        try:
            process = launch.start(
                command,
                root=self._root,
                hub=self._hub,
                way=self._way,
                on_line=self._lines.open(key),
            )
        except AtollError as error:
            log.error("%s %s was not started: %s", *key, error)
            self._spawn(self._lines.end(key, timeout_s=0.0))
            self._report(command, "exited", exit_code=1, error=error.to_dict())
            return
        log.info("%s %s runs as process %d", *key, process.pid)
        self._running[key] = process
        self._processes.add(process)
        self._spawn(self._supervise(process))

    def _stop(self, command: Stop) -> None:
        process = self._running.get((command.job, command.member))
        if process is None:
            return
        if command.attempt and command.attempt != process.command.attempt:
            return  # it was meant for an older process, and comes late
        self._spawn(process.stop(grace_s=command.grace_s))

    # ------------------------------------------------------------------------------ reports

    async def _supervise(self, process: JobProcess) -> None:
        """Tell the hub that it is there, wait for its end, ship its last lines, tell how it ended.

        It counts as running when it registers, which it says itself. The end of a process whose
        place a newer one has taken is nobody's business.
        """
        key, command = process.key, process.command
        job, member = key
        started = self._report(command, "starting")
        ended: Exit = await process.wait()
        self._processes.discard(process)
        if self._running.get(key) is process:
            del self._running[key]
        log.info("%s %s ended with %d", job, member, ended.code)
        await self._lines.flush(key, timeout_s=5.0)
        await asyncio.wait([started])
        if not process.replaced:
            error = ended.error.to_dict() if ended.error is not None else None
            tail = ended.tail if error is not None else []
            code = EXIT_LEFT if process.leaving and ended.code else ended.code
            await asyncio.wait(
                [self._report(command, "exited", exit_code=code, error=error, tail=tail)]
            )
        await self._lines.end(key, timeout_s=5.0)

    def _report(self, command: Launch, state: str, **more: Any) -> asyncio.Task[None]:
        """Tell the hub how a process fares, in a task of its own."""
        job, member, attempt = command.job, command.member, command.attempt
        return self._spawn(self._tell(ProcessState(job, member, state, attempt=attempt, **more)))

    async def _tell(self, body: Message) -> None:
        """Tell the hub, however long it is away; only a refusal ends the trying."""
        waits = backoff()
        while self._link.failed is None:
            try:
                await self._link.request(body, timeout_s=ANSWER_TIMEOUT_S)
                return
            except DeadlineExceeded:
                continue
            except _REFUSALS as error:
                log.warning("the hub was not told %s: %s", body, error)
                return
            except AtollError as error:
                log.warning("the hub could not take %s: %s", body, error)
                await asyncio.sleep(next(waits))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the agent failed", exc_info=task.exception())
