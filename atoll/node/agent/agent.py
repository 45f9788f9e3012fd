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
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import AtollError, AuthError, DeadlineExceeded, HubUnreachable
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.http.client import HubClient
from atoll.net.link import Link
from atoll.node.agent.attempt import Attempt
from atoll.node.agent.log_shipping import Key, LogShipper
from atoll.node.agent.options import Machine
from atoll.node.agent.reports import Reports
from atoll.node.agent.workspace import WorkspaceBuilder
from atoll.node.launchers import Launchers
from atoll.node.launchers.resources import ResourceAllocator
from atoll.wire.limits import EXIT_LEFT
from atoll.wire.messages import (
    Drain,
    Launch,
    Message,
    Offer,
    Offering,
    QueueAck,
    QueueClaim,
    QueueItem,
    QueueItems,
    Stop,
    unpack_command,
)
from atoll.wire.states import ProcessPhase

log = logging.getLogger(__name__)

LEASE_S = 30.0
WAIT_S = 20.0
"""How long one ask for commands stays open at the hub."""

LEAVE_GRACE_S = 5.0
"""What workers get to finish or abandon their round when the machine goes away."""

CLEAN_S = 30.0
"""How long commands wait for what earlier agents left to be removed."""

KNOWN_LAUNCHES = 8
"""Launches per member that are recognised when they come again."""


class Agent:
    """Runs the processes that the hub asks this machine for, until told to leave."""

    def __init__(
        self,
        link: Link,
        *,
        node: str,
        home: Path,
        hub: str,
        token: str = "",
        endpoint: HubEndpoint = PLAIN,
        slots: int = 1,
        gpus: int = 0,
    ) -> None:
        """Serve on a link that is connected already.

        Args:
            link: Session of this node.
            node: Its id.
            home: Folder of this agent; jobs get folders under ``home/jobs``.
            hub: URL that workers dial.
            token: The node's own.
            endpoint: How they reach it.
            slots: How many processes this machine takes at once.
            gpus: How many accelerators it has.
        """
        self._link = link
        self._queue = f"node/{node}"
        self._launchers = Launchers(home=home, node=node)
        self._reports = Reports(link)
        self._machine = Machine(
            jobs=home / "jobs",
            hub=hub,
            endpoint=endpoint,
            reports=self._reports,
            lines=LogShipper(link),
            shares=ResourceAllocator(slots=slots, gpus=gpus),
            launcher=self._launchers.of,
            token=token,
            preparer=WorkspaceBuilder(
                home, lambda job: HubClient(hub, job, endpoint=self.endpoint)
            ),
        )
        self._running: dict[Key, Attempt] = {}
        self._attempts: set[Attempt] = set()
        """All that have not ended, also those whose place a newer one has taken."""
        self._launched: dict[Key, deque[str]] = {}
        self._draining: dict[str, str] = {}
        """Who wants this machine drained, and why; nobody: it takes work."""
        self._offered = False
        """The hub has been told an offer, and is told again when it may have forgotten."""
        link.on_notice(self._noticed)
        link.on_reconnect(self._reconnected)

    @property
    def running(self) -> list[str]:
        """The processes that run now, as ``job/member``."""
        return [f"{job}/{member}" for job, member in self._running]

    @property
    def children(self) -> set[int]:
        """Process ids of every child that has not been seen to end."""
        own = {attempt.child for attempt in self._attempts if attempt.child is not None}
        return own | self._machine.preparer.children

    @property
    def draining(self) -> str:
        """Why this machine takes no work now; empty: it does."""
        return next(iter(self._draining.values()), "")

    @property
    def endpoint(self) -> HubEndpoint:
        """How processes that start now reach the hub."""
        return self._machine.endpoint

    @property
    def offer(self) -> Offer:
        """What the owner of this machine gives now."""
        return self._machine.offer

    async def serve(self) -> None:
        """Take commands until cancelled.

        Raises:
            AuthError: the hub no longer knows this node.
        """
        await asyncio.wait(
            [asyncio.ensure_future(asyncio.to_thread(self._launchers.clean))], timeout=CLEAN_S
        )
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

    async def set_offer(
        self,
        offer: Offer,
        *,
        endpoint: HubEndpoint | None = None,
        nice: int = 0,
        trusted_keys: Sequence[str] = (),
    ) -> None:
        """Give this much of the machine from now on; what runs keeps what it has.

        The hub is told. While the offer says that it is paused, the machine is drained.

        Args:
            offer: What the owner gives.
            endpoint: How processes that start from now on reach the hub; None: as before.
            nice: The least niceness that the owner wants.
            trusted_keys: Public keys of those whose images the owner trusts.
        """
        machine = self._machine
        machine.offer, machine.nice, machine.trusted_keys = offer, nice, tuple(trusted_keys)
        machine.endpoint = endpoint or machine.endpoint
        machine.watch.total_bytes = offer.memory_bytes
        self._offered = True
        self._reports.tell(Offering(offer))
        if offer.paused:
            await self.drain(offer.paused, source="policy")
        else:
            await self.undrain(source="policy")

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
            self._reports.tell(Drain(draining=True, reason=reason))
        await self._end_all(LEAVE_GRACE_S)

    async def undrain(self, *, source: str) -> None:
        """Take work again, unless somebody else still wants the machine drained."""
        if self._draining.pop(source, None) is not None and not self._draining:
            log.info("takes work again")
            self._reports.tell(Drain(draining=False))

    async def leave(self, *, reason: str = "the node leaves", grace_s: float | None = None) -> None:
        """End every process, tell the hub what can be told in that time, stop all tasks."""
        self._draining.setdefault("leave", reason)
        if self._link.connected:
            self._reports.tell(Drain(draining=True, reason=reason))
        await self._end_all(LEAVE_GRACE_S if grace_s is None else grace_s)
        await self._reports.close()
        await self._machine.watch.close()
        await self._machine.lines.close(timeout_s=0.5)

    def kill_all(self) -> None:
        """Kill every process now, e.g. because a person has asked twice."""
        for attempt in self._attempts:
            attempt.kill()

    async def _end_all(self, grace_s: float) -> None:
        attempts = list(self._running.values())
        await asyncio.gather(*(a.stop(grace_s=grace_s, leaving=True) for a in attempts))

    def _noticed(self, body: Message) -> None:
        """Hear from the hub that a person wants this machine drained, or not any more."""
        if not isinstance(body, Drain):
            return
        if body.draining:
            reason = body.reason or "a person asked for it"
            self._reports.spawn(self.drain(reason, source="person"))
        else:
            self._reports.spawn(self.undrain(source="person"))

    def _reconnected(self) -> None:
        """Tell what the hub, which may be another process now, has perhaps never heard."""
        if self._offered:
            self._reports.tell(Offering(self.offer))
        if self._draining:
            self._reports.tell(Drain(draining=True, reason=self.draining))

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
                self._launch(command)
                await asyncio.sleep(0)  # what it tells first is on its way before the ack
            else:
                self._stop(command)
        ack = QueueAck(self._queue, item.lease)
        await self._link.request(ack, timeout_s=LEASE_S)

    def _launch(self, command: Launch) -> None:
        key = (command.job, command.member)
        launched = self._launched.setdefault(key, deque(maxlen=KNOWN_LAUNCHES))
        if command.token in launched:
            return  # said before
        launched.append(command.token)
        if self._draining:
            log.info("%s %s is not started: %s", *key, self.draining)
            self._reports.process(command, ProcessPhase.EXITED, exit_code=EXIT_LEFT)
            return
        attempt = Attempt(command, self._machine, former=self._running.get(key))
        self._running[key] = attempt
        self._attempts.add(attempt)
        self._reports.spawn(self._supervise(attempt))

    async def _supervise(self, attempt: Attempt) -> None:
        try:
            await attempt.run()
        finally:
            self._attempts.discard(attempt)
            if self._running.get(attempt.key) is attempt:
                del self._running[attempt.key]

    def _stop(self, command: Stop) -> None:
        attempt = self._running.get((command.job, command.member))
        if attempt is None:
            return
        if command.attempt and command.attempt != attempt.command.attempt:
            return  # it was meant for an older process, and comes late
        self._reports.spawn(attempt.stop(grace_s=command.grace_s))
