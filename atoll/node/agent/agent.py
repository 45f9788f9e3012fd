"""The agent of a machine: takes commands from its queue, runs processes, reports how they end.

Commands are delivered at least once: if the machine sleeps or the agent dies before the ack, the
lease expires and the hub delivers the command again. Every launch has its own token, by which a
repeated one is recognized, acked, and otherwise ignored.

At most one process of a member runs here: an older one is killed before the next is started, even
if it is stopped (SIGSTOP) and cannot react.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import AtollError, AuthError, DeadlineExceeded, HubUnreachable
from atoll.net.endpoint import HubEndpoint
from atoll.net.http.client import HubClient
from atoll.net.link import Link
from atoll.node.agent.attempt import Attempt
from atoll.node.agent.log_shipping import Key, LogShipper
from atoll.node.agent.options import Machine
from atoll.node.agent.reports import Reports
from atoll.node.agent.workspace import WorkspaceBuilder
from atoll.node.identity.identity import Identity
from atoll.node.launchers import Launchers
from atoll.node.launchers.launcher import Sandbox
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

LEASE_S = 30.0  # a command of an agent that died is delivered again after this
WAIT_S = 20.0
"""How long one claim waits at the hub for a command."""

LEAVE_GRACE_S = 5.0
"""Time for workers to finish or abandon their round when the machine goes away."""

CLEAN_S = 30.0
"""How long commands wait for the removal of containers left by earlier agents."""

KNOWN_LAUNCHES = 1024
"""Latest launches that are recognized when repeated: many more than one lease lasts."""


class Agent:
    """Runs the processes that the hub assigns to this machine, until asked to leave."""

    def __init__(
        self,
        link: Link,
        identity: Identity,
        *,
        home: Path,
        endpoint: HubEndpoint | None = None,
        slots: int = 1,
        gpus: int = 0,
    ) -> None:
        """Serve on the connected link of a node; jobs get folders under ``home/jobs``.

        Up to `slots` workers run at once. They reach the hub by `endpoint`; None: the identity's.
        """
        self._link = link
        self._queue = f"node/{identity.node}"
        self._launchers = Launchers(home=home, node=identity.node)
        self._reports = Reports(link)
        self._machine = Machine(
            jobs=home / "jobs",
            hub=identity.hub,
            endpoint=endpoint or identity.endpoint,
            reports=self._reports,
            lines=LogShipper(link),
            shares=ResourceAllocator(slots=slots, gpus=gpus),
            launcher=self._launchers.of,
            token=identity.token,
            preparer=WorkspaceBuilder(
                home, lambda job: HubClient(identity.hub, job, endpoint=self.endpoint)
            ),
        )
        self._running: dict[Key, Attempt] = {}
        self._attempts: set[Attempt] = set()
        """All that have not ended, including replaced ones."""
        self._launched: deque[tuple[Key, str]] = deque(maxlen=KNOWN_LAUNCHES)
        """The latest launches, with their tokens."""
        self._draining: dict[str, str] = {}
        """Source of each drain request -> its reason; empty: takes work."""
        self._offered = False
        """Whether an offer was sent, which is repeated after a reconnect."""
        link.on_notice(self._noticed)
        link.on_reconnect(self._reconnected)

    @property
    def running(self) -> list[str]:
        """Running processes, as ``job/member``."""
        return [f"{job}/{member}" for job, member in self._running]

    @property
    def children(self) -> set[int]:
        """Process ids of all children that have not been reaped."""
        own = {attempt.child for attempt in self._attempts if attempt.child is not None}
        return own | self._machine.preparer.children

    @property
    def draining(self) -> str:
        """Why this machine takes no work; empty: it does."""
        return next(iter(self._draining.values()), "")

    @property
    def endpoint(self) -> HubEndpoint:
        """How new processes reach the hub."""
        return self._machine.endpoint

    @property
    def offer(self) -> Offer:
        """The current offer of the machine's owner."""
        return self._machine.offer

    async def serve(self) -> None:
        """Process commands until cancelled.

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
        sandbox: Sandbox | None = None,
    ) -> None:
        """Change the offer for new processes, and report it; drain the machine while it is paused.

        `endpoint` None is unchanged; `nice` is the minimum niceness.
        """
        machine = self._machine
        machine.offer, machine.nice, machine.trusted_keys = offer, nice, tuple(trusted_keys)
        machine.endpoint, machine.sandbox = endpoint or machine.endpoint, sandbox
        machine.watch.total_bytes = offer.memory_bytes
        self._offered = True
        self._reports.tell(Offering(offer))
        if offer.paused:
            await self.drain(offer.paused, source="policy")
        else:
            await self.undrain(source="policy")

    # ----------------------------------------------------------------------------- draining

    async def drain(self, reason: str, *, source: str) -> None:
        """Take no more work, and let every process leave its round and end within 5 s.

        Work is taken again when no `source` requests draining any more.
        """
        news = self._draining.get(source) != reason
        self._draining[source] = reason
        if news:
            log.info("takes no more work: %s", reason)
            self._reports.tell(Drain(draining=True, reason=reason))
        await self._end_all(LEAVE_GRACE_S)

    async def undrain(self, *, source: str) -> None:
        """Withdraw a source's drain request."""
        if self._draining.pop(source, None) is not None and not self._draining:
            log.info("takes work again")
            self._reports.tell(Drain(draining=False))

    async def leave(self, *, reason: str = "the node leaves", grace_s: float | None = None) -> None:
        """End every process within `grace_s`, wait briefly for the last reports, stop all tasks."""
        self._draining.setdefault("leave", reason)
        if self._link.connected:
            self._reports.tell(Drain(draining=True, reason=reason, leaving=True))
        await self._end_all(LEAVE_GRACE_S if grace_s is None else grace_s)
        await self._reports.close()
        await self._machine.watch.close()
        await self._machine.lines.close(timeout_s=0.5)

    def kill_all(self) -> None:
        """Kill every process now, e.g. on a second signal."""
        for attempt in self._attempts:
            attempt.kill()

    async def _end_all(self, grace_s: float) -> None:
        attempts = list(self._running.values())
        await asyncio.gather(*(a.stop(grace_s=grace_s, leaving=True) for a in attempts))

    def _noticed(self, body: Message) -> None:
        if not isinstance(body, Drain):
            return
        if body.draining:
            reason = body.reason or "requested by a user"
            self._reports.spawn(self.drain(reason, source="person"))
        else:
            self._reports.spawn(self.undrain(source="person"))

    def _reconnected(self) -> None:
        """Repeat the state that a restarted hub may not know."""
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
        """Execute one command, then ack it; an impossible command is reported, not retried."""
        try:
            command = unpack_command(item.payload)
        except AtollError as error:
            log.error("a command cannot be read: %s", error)
        else:
            if isinstance(command, Launch):
                self._launch(command)
                await asyncio.sleep(0)  # so that its first report is sent before the ack
            else:
                self._stop(command)
        ack = QueueAck(self._queue, item.lease)
        await self._link.request(ack, timeout_s=LEASE_S)

    def _launch(self, command: Launch) -> None:
        key = (command.job, command.member)
        if (key, command.token) in self._launched:
            return  # a repeated delivery
        self._launched.append((key, command.token))
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
            return  # late: it was meant for an older process
        self._reports.spawn(attempt.stop(grace_s=command.grace_s))
