"""Connected nodes, and the processes of every job from launch to exit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

import msgspec

from atoll.clock import Clock
from atoll.errors import AuthError, HubError
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.nodes.store import Node, NodeRecord, NodeStore
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.hub.rounds.service import RoundService
from atoll.hub.sessions.session import Session, Sessions
from atoll.hub.stores import Stores
from atoll.ids import is_follower, session_id, slot_of
from atoll.wire.messages import (
    Drain,
    Finished,
    Leaving,
    NodeInfo,
    Offering,
    Peer,
    ProcessState,
    Register,
    Registered,
    RosterReply,
)
from atoll.wire.states import JobState, MemberState, ProcessPhase

logger = logging.getLogger(__name__)

IDENTITY = 64
"""Characters of a fingerprint."""
LAST_WORDS_S = 3.0
"""How long the `Finished` of a process that exited well may still be under way."""


class Membership:
    """Keeps the records of nodes and members, and reports changes to rounds and placement."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        rounds: RoundService,
        checkpoints: Checkpoints,
        clock: Clock,
    ) -> None:
        self._stores = stores
        self._jobs = stores.jobs
        self._events = stores.events
        self._sessions = sessions
        self._rounds = rounds
        self._checkpoints = checkpoints
        self._clock = clock
        self._book = NodeStore(stores.database)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self.nodes: dict[str, Node] = {}
        self.changed: Callable[[str], Awaitable[None]] = _ignore
        """Called with the job of a member that ended, or with "" for a node."""

    # ------------------------------------------------------------------------- nodes

    async def node_opened(self, session: Session) -> None:
        """Record that a node agent connected; a new process of it has no earlier children."""
        known, before = self.nodes.get(session.address), self._book.get(session.address)
        same = before is not None and before.incarnation == session.incarnation
        info = session.info or (known.info if known else NodeInfo("", "", "", ""))
        node = Node(session.address, info, session.incarnation, last_seen=session.last_seen)
        if known is not None and same:  # what it reported since its agent started still holds
            node.info = msgspec.structs.replace(info, offer=known.info.offer)
        if before is not None and same:  # also when the hub was restarted meanwhile
            node.draining, node.drain_reason = before.draining, before.reason
        # Not connected until its silent processes are known again: else placement replaces them.
        node.connected = known is not None and known.connected
        self.nodes[session.address] = node
        try:
            await self._remember(node)
            if not node.connected:
                await self._events.add("", "node-online", f"{session.address} is online")
            if same:
                await self._silent_are_back(session.address)
        finally:  # also when the disk is full
            node.connected = self._sessions.get(session.address) is not None
        if before is not None and not same:
            for job, member in self._members_on(session.address):
                unheard = not member.incarnation and member.state != MemberState.ASSIGNED
                if unheard and not self._session(job, member.member):
                    await self._lose(job.job, member.member, "its node agent was restarted")
        await self.changed("")

    async def _remember(self, node: Node) -> None:
        record = NodeRecord(node.incarnation, node.draining, node.drain_reason)
        await self._book.put(node.node, record)

    async def _silent_are_back(self, node: str) -> None:
        """Mark processes without sessions as running: they live on while their node is away."""
        for job in self._jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else []:
                gone = member.state == MemberState.LOST and member.exit_code is None
                silent = (job.silent and not member.incarnation) or is_follower(member.member)
                if gone and silent and member.node == node:
                    await self._jobs.members.returned(job.job, member.member)

    async def node_lost(self, session: Session) -> None:
        """Record the loss of a node agent; members with their own sessions live on."""
        node = self.nodes.get(session.address)
        if node is None or self._sessions.get(session.address) is not None:
            return
        node.connected, node.last_seen = False, session.last_seen
        node.stats = dict(session.stats)
        if node.left:
            await self._events.add("", "node-left", f"{session.address} left")
        else:
            await self._events.add("", "node-lost", f"{session.address} does not answer")
        for job, member in self._members_on(session.address):
            if self._sessions.get(session.address) is not None:
                return  # it is back, and its processes with it
            if self._session(job, member.member) is None:
                await self._lose(job.job, member.member, "it disconnected")

    async def drain(self, session: Session, body: Drain) -> None:
        """Record that a node drains, or no longer does.

        Raises:
            AuthError: the session is not that of a node.
        """
        node = self.nodes.get(session.address)
        if node is None:
            raise AuthError("only a node can be drained", given=session.address)
        node.left = body.leaving
        if node.draining != body.draining:
            node.draining = body.draining
            node.drain_reason = body.reason if body.draining else ""
            await self._remember(node)
            why = f": {body.reason}" if body.reason else ""
            text = f"{node.node} {'will leave' if body.draining else 'stays'}{why}"
            kind = "node-draining" if body.draining else "node-stays"
            await self._events.add("", kind, text)
        await self.changed("")

    async def offering(self, session: Session, body: Offering) -> None:
        """Record a changed offer of a node's owner.

        Raises:
            AuthError: the session is not that of a node.
        """
        node = self.nodes.get(session.address)
        if node is None:
            raise AuthError("only a node can offer itself", given=session.address)
        before = node.info.offer.paused if node.info.offer else ""
        node.info = msgspec.structs.replace(node.info, offer=body.offer)
        if body.offer.paused != before:
            kind = "node-paused" if body.offer.paused else "node-unpaused"
            text = f"takes no work: {body.offer.paused}" if body.offer.paused else "takes work"
            await self._events.add("", kind, f"{node.node} {text}")
        await self.changed("")

    # ------------------------------------------------------------------------ members

    async def member_opened(self, session: Session) -> None:
        """Record that a member's process connected."""
        async with self._lock_of(session.job):
            record = self._record(session.job, session.member)
            if record is None or not (record.live or record.state == MemberState.LOST):
                return
            if await self._jobs.members.connected(
                session.job, session.member, incarnation=session.incarnation
            ):
                self._rounds.back(session.job, session.member)

    async def member_lost(self, session: Session) -> None:
        """Record the end of a member's session; it is lost unless it has reported its end."""
        why = "its connection ended"
        await self._lose(session.job, session.member, why, incarnation=session.incarnation)

    async def register(self, session: Session, body: Register) -> Registered:
        """Answer a member that registers for its job.

        Raises:
            HubError: the job is not running.
            AuthError: the session is not that of a member of the job.
        """
        async with self._lock_of(session.job):
            job = self._jobs.get(session.job)
            record = job.members.get(session.member)
            if record is None:
                raise AuthError(
                    "only members of a job can register",
                    given=session.address,
                    expected="one of " + ", ".join(sorted(job.members)),
                )
            await self._jobs.members.update(
                session.job, session.member, dial=body.dial, serves=body.state,
                identity=body.identity[:IDENTITY],
            )  # fmt: skip
            if job.silent and job.state == JobState.RUNNING and not self._rounds.has(job.job):
                await self._rounds.open(job, fresh=True)  # a container that holds a trainer
            return await self._rounds.register(job, record)

    async def leaving(self, session: Session, body: Leaving) -> None:
        """Record that a member leaves permanently: rounds no longer wait for it."""
        async with self._lock_of(session.job):
            record = self._record(session.job, session.member)
            if record is None or not record.live:
                return
            if not record.leaving:
                await self._jobs.members.update(session.job, session.member, leaving=True)
                text = f"{record.node}'s worker leaves" + (
                    f": {body.reason}" if body.reason else ""
                )
                await self._events.add(session.job, "member-leaving", text, member=session.member)
            await self._rounds.leave(session.job, session.member)

    def roster(self, job: str) -> RosterReply:
        """Return the live members of a job and their addresses."""
        members = self._jobs.get(job).members
        live = self.live(job)
        return RosterReply([Peer(m, members[m].dial, members[m].identity) for m in live])

    def live(self, job: str) -> list[str]:
        """Return the launched members of a job that have not ended, in slot order."""
        members = self._jobs.get(job).members.values()
        return sorted((m.member for m in members if m.live), key=slot_of)

    async def finished(self, session: Session, body: Finished) -> None:
        """Record the result that a member reports; repeating it changes nothing."""
        async with self._lock_of(session.job):
            record = self._record(session.job, session.member)
            if record is None:
                return
            if record.state not in (MemberState.DONE, MemberState.FAILED):
                await self._jobs.members.finished(
                    session.job, session.member, ok=body.ok, result=body.result, error=body.error
                )
            await self._rounds.gone(session.job, session.member, lost=not body.ok)
        await self._after(session.job)

    async def process_state(self, node: str, body: ProcessState) -> None:
        """Record the state of a process as reported by its node.

        Raises:
            AuthError: the process is not one of this node's.
        """
        record = self._process(body.job, body.member)
        if record is None:
            return
        if body.attempt not in (0, record.attempt):
            return  # of a process that was replaced
        if node and record.node != node:
            raise AuthError(
                "this process belongs to another node", given=node, expected=record.node
            )
        if body.state != ProcessPhase.EXITED:
            if record.state in (MemberState.ASSIGNED, MemberState.STARTING):
                await self._jobs.members.launched(body.job, body.member, body.state)
            return
        await self._jobs.members.update(
            body.job,
            body.member,
            exit_code=body.exit_code,
            error=body.error or record.error,
            tail=body.tail,
            collecting=body.collecting,
        )
        await self._exited(body)

    async def _exited(self, body: ProcessState) -> None:
        """Decide what the exit of a process means for its member."""
        if body.exit_code == 0:
            await self._hear_last_words(body.job, body.member)
        async with self._lock_of(body.job):
            record = self._process(body.job, body.member)
            unheard = is_follower(body.member) or self._jobs.get(body.job).silent
            if record is None or body.attempt not in (0, record.attempt):
                return  # of a process that was replaced, e.g. while this report waited for room
            if not (record.live or (unheard and record.state == MemberState.LOST)):
                return
            state = await self._jobs.members.exited(body.job, body.member, body.exit_code)
            await self._gone(body.job, body.member, lost=state != MemberState.DONE)
        self._sessions.end(session_id(body.job, body.member))
        await self._after(body.job)

    async def _hear_last_words(self, job: str, member: str) -> None:
        """Wait briefly for a `Finished` that may still arrive on the member's own session."""
        deadline = self._clock.monotonic() + LAST_WORDS_S
        while self._clock.monotonic() < deadline:
            record, session = self._record(job, member), self._session_of(job, member)
            if record is None or not record.live:
                return
            if session is None or not session.connected:
                return
            await asyncio.sleep(0.05)

    async def reckon(self) -> None:
        """Mark members as lost that did not reconnect in time after a restart of the hub."""
        for job in self._jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else []:
                alone = self._session(job, member.member) is None
                node = self.nodes.get(member.node)
                nodeless = node is None or not node.connected
                if member.live and alone and (nodeless or member.incarnation):
                    await self._lose(job.job, member.member, "it did not reconnect")

    async def give_up(self, job: str, member: str) -> None:
        """Mark a member as stopped if its node did not report its end in time."""
        async with self._lock_of(job):
            record = self._record(job, member)
            if record is None or not record.live:
                return
            await self._jobs.members.stopped(job, member)
            await self._rounds.gone(job, member, lost=True)
        self._sessions.end(session_id(job, member))
        await self._after(job)

    async def fail(self, job: str, member: str, *, error: dict[str, str]) -> None:
        """Fail a member permanently, whatever its own process reports."""
        async with self._lock_of(job):
            record = self._record(job, member)
            if record is None or record.state == MemberState.DONE or record.error == error:
                return
            if record.live:
                await self._rounds.gone(job, member, lost=True)
            await self._jobs.members.given_up(job, member, error=error)
        self._sessions.end(session_id(job, member))
        await self._after(job)

    async def _lose(self, job: str, member: str, why: str, *, incarnation: str = "") -> None:
        """Mark a live member as lost, if it is still the same process."""
        async with self._lock_of(job):
            record = self._process(job, member)
            if record is None or not record.live:
                return
            if incarnation and record.incarnation != incarnation:
                return
            await self._jobs.members.lost(job, member, why=why)
            await self._gone(job, member, lost=True)
        await self._after(job)

    async def _gone(self, job: str, process: str, *, lost: bool) -> None:
        """Report a lost member to rounds, which do not know followers."""
        if not is_follower(process):
            await self._rounds.gone(job, process, lost=lost)

    async def _after(self, job: str) -> None:
        """Decide what a member's end means for the job."""
        await self._checkpoints.member_gone(job)
        await self.changed(job)

    # ------------------------------------------------------------------------ look-ups

    def _lock_of(self, job: str) -> asyncio.Lock:
        """Return the lock of a job; it exists while a task holds it or waits for it."""
        lock = self._locks.get(job)
        if lock is None:
            lock = self._locks[job] = asyncio.Lock()
        return lock

    def _record(self, job: str, member: str) -> Member | None:
        try:
            return self._jobs.get(job).members.get(member)
        except HubError:
            return None

    def _process(self, job: str, name: str) -> Member | None:
        found = self._jobs.find(job)
        return found.process(name) if found is not None else None

    def _session(self, job: Job, member: str) -> Session | None:
        return self._session_of(job.job, member)

    def _session_of(self, job: str, member: str) -> Session | None:
        return self._sessions.get(session_id(job, member))

    def _members_on(self, node: str) -> list[tuple[Job, Member]]:
        return [
            (job, member)
            for job in self._jobs.list()
            if job.state == JobState.RUNNING
            for member in job.processes
            if member.node == node and member.live
        ]


async def _ignore(job: str) -> None:
    """Default listener, until placement is attached."""
