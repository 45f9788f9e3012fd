"""Who is there: the nodes that joined, and the processes of every job, from launch to last word."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable

import msgspec

from atoll.clock import Clock
from atoll.errors import AuthError, HubError
from atoll.hub.jobs.completion import MAX_FAILURES, end_state
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.nodes.store import Node, NodeRecord, NodeStore
from atoll.hub.rounds.service import RoundService
from atoll.hub.sessions.session import Session, Sessions
from atoll.hub.storage.checkpoints import Checkpoints
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

LAST_WORDS_S = 3.0
"""How long the `Finished` of a process that exited well may still be under way."""


class Membership:
    """Keeps the books of nodes and members, and tells rounds and placement what changed."""

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
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.nodes: dict[str, Node] = {}
        self.changed: Callable[[str], Awaitable[None]] = _ignore
        """Called with a job one of whose members came to an end, or with "" for a node."""

    # ------------------------------------------------------------------------- nodes

    async def node_opened(self, session: Session) -> None:
        """A node agent connected; a new process of it has no children from before."""
        known, before = self.nodes.get(session.address), self._book.get(session.address)
        same = before is not None and before.incarnation == session.incarnation
        info = session.info or (known.info if known else NodeInfo("", "", "", ""))
        node = Node(session.address, info, session.incarnation)
        if known is not None and same:  # what it told since its agent started still holds
            node.info = msgspec.structs.replace(info, offer=known.info.offer)
        if before is not None and same:  # also when the hub was restarted meanwhile
            node.draining, node.drain_reason = before.draining, before.reason
        self.nodes[session.address] = node
        await self._remember(node)
        if known is None or not known.connected:
            await self._events.add("", "node-online", f"{session.address} is online")
        if same:
            await self._silent_are_back(session.address)
        elif before is not None:
            for job, member in self._members_on(session.address):
                unheard = not member.incarnation and member.state != MemberState.ASSIGNED
                if unheard and not self._session(job, member.member):
                    await self._lose(job.job, member.member, "its node agent was restarted")
        await self.changed("")

    async def _remember(self, node: Node) -> None:
        standing = NodeRecord(node.incarnation, node.draining, node.drain_reason)
        await self._book.put(node.node, standing)

    async def _silent_are_back(self, node: str) -> None:
        """Processes that never speak live on while their node is away: they are there again."""
        for job in self._jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else []:
                gone = member.state == MemberState.LOST and member.exit_code is None
                silent = (job.silent and not member.incarnation) or is_follower(member.member)
                if gone and silent and member.node == node:
                    await self._jobs.update_member(
                        job.job, member.member, state=MemberState.RUNNING
                    )
                    text = f"{member.member} is back with {node}"
                    await self._events.add(job.job, "member-back", text, member=member.member)

    async def node_lost(self, session: Session) -> None:
        """A node agent is gone; members that speak for themselves live on."""
        node = self.nodes.get(session.address)
        if node is None or self._sessions.get(session.address) is not None:
            return
        node.connected, node.last_heard = False, session.last_heard
        node.stats = dict(session.stats)
        await self._events.add("", "node-lost", f"{session.address} does not answer")
        for job, member in self._members_on(session.address):
            if self._session(job, member.member) is None:
                await self._lose(job.job, member.member, f"its node {session.address} is gone")

    async def drain(self, session: Session, body: Drain) -> None:
        """A node will go away soon, or stays after all.

        Raises:
            AuthError: the session is not that of a node.
        """
        node = self.nodes.get(session.address)
        if node is None:
            raise AuthError("only a node can be drained", given=session.address)
        if node.draining != body.draining:
            node.draining = body.draining
            node.drain_reason = body.reason if body.draining else ""
            await self._remember(node)
            why = f": {body.reason}" if body.reason else ""
            text = f"{node.node} {'will go away' if body.draining else 'stays'}{why}"
            kind = "node-draining" if body.draining else "node-stays"
            await self._events.add("", kind, text)
        await self.changed("")

    async def offering(self, session: Session, body: Offering) -> None:
        """What the owner of a node lets the cluster have of it has changed.

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
        """A member's process connected."""
        async with self._locks[session.job]:
            record = self._record(session.job, session.member)
            if record is None or not (record.live or record.state == MemberState.LOST):
                return
            back = record.state == MemberState.LOST
            await self._jobs.update_member(
                session.job,
                session.member,
                state=MemberState.RUNNING,
                incarnation=session.incarnation,
            )
            if back:
                text = f"{session.member} is back"
                await self._events.add(session.job, "member-back", text, member=session.member)
                self._rounds.back(session.job, session.member)

    async def member_lost(self, session: Session) -> None:
        """A member's session ended; unless it had said its last words, it is lost."""
        why = "its connection ended"
        await self._lose(session.job, session.member, why, incarnation=session.incarnation)

    async def register(self, session: Session, body: Register) -> Registered:
        """Answer a member that enters its job.

        Raises:
            HubError: the job is not running.
            AuthError: the session is not that of a member of the job.
        """
        async with self._locks[session.job]:
            job = self._jobs.get(session.job)
            record = job.members.get(session.member)
            if record is None:
                raise AuthError(
                    "only members of a job can register",
                    given=session.address,
                    expected="one of " + ", ".join(sorted(job.members)),
                )
            await self._jobs.update_member(
                session.job, session.member, dial=body.dial, serves=body.state
            )
            if job.silent and job.state == JobState.RUNNING and not self._rounds.has(job.job):
                await self._rounds.open(job, fresh=True)  # a container that holds a trainer
            return await self._rounds.register(job, record)

    async def leaving(self, session: Session, body: Leaving) -> None:
        """A member leaves for good: nobody waits for it any more."""
        async with self._locks[session.job]:
            record = self._record(session.job, session.member)
            if record is None or not record.live:
                return
            if not record.leaving:
                await self._jobs.update_member(session.job, session.member, leaving=True)
                text = f"{session.member} leaves" + (f": {body.reason}" if body.reason else "")
                await self._events.add(session.job, "member-leaving", text, member=session.member)
            await self._rounds.leave(session.job, session.member)

    def roster(self, job: str) -> RosterReply:
        """Return the live members of a job and where they can be dialled."""
        members = self._jobs.get(job).members
        return RosterReply([Peer(m, members[m].dial) for m in self.live(job)])

    def live(self, job: str) -> list[str]:
        """Return the members of a job that were launched and have not ended, in slot order."""
        members = self._jobs.get(job).members.values()
        return sorted((m.member for m in members if m.live), key=slot_of)

    async def finished(self, session: Session, body: Finished) -> None:
        """A member has said its last words; saying them again changes nothing."""
        async with self._locks[session.job]:
            record = self._record(session.job, session.member)
            if record is None:
                return
            if record.state not in (MemberState.DONE, MemberState.FAILED):
                await self._jobs.finished(
                    session.job, session.member, ok=body.ok, result=body.result, error=body.error
                )
            await self._rounds.gone(session.job, session.member, lost=not body.ok)
        await self._after(session.job)

    async def process_state(self, node: str, body: ProcessState) -> None:
        """A node tells how a process of a job fares.

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
                silent = self._jobs.get(body.job).silent and not record.incarnation
                running = silent or body.state == ProcessPhase.RUNNING
                state = MemberState.RUNNING if running else MemberState.STARTING
                await self._jobs.update_member(body.job, body.member, state=state)
            return
        await self._jobs.update_member(
            body.job,
            body.member,
            exit_code=body.exit_code,
            error=body.error or record.error,
            tail=body.tail,
            collecting=body.collecting,
        )
        await self._exited(body)

    async def _exited(self, body: ProcessState) -> None:
        """Decide what the end of a process means for its member."""
        if body.exit_code == 0:
            await self._hear_last_words(body.job, body.member)
        async with self._locks[body.job]:
            record = self._process(body.job, body.member)
            unheard = is_follower(body.member) or self._jobs.get(body.job).silent
            if record is None:
                return
            if not (record.live or (unheard and record.state == MemberState.LOST)):
                return
            state = end_state(record, body.exit_code, stopping=self._jobs.get(body.job).stopping)
            await self._jobs.update_member(body.job, body.member, state=state)
            if state == MemberState.LEFT:
                text = f"{body.member} has left"
                await self._events.add(body.job, "member-left", text, member=body.member)
            elif state == MemberState.FAILED:
                why = body.error or record.error or {}
                told = ": ".join(filter(None, (why.get("what"), why.get("given"))))
                text = f"{body.member} ended with exit status {body.exit_code}"
                text += f": {told}" if told else ""
                await self._events.add(body.job, "member-failed", text, member=body.member)
            await self._gone(body.job, body.member, lost=state != MemberState.DONE)
        self._sessions.end(session_id(body.job, body.member))
        await self._after(body.job)

    async def _hear_last_words(self, job: str, member: str) -> None:
        """Wait a little for a `Finished` that is still under way on the member's own session."""
        deadline = self._clock.monotonic() + LAST_WORDS_S
        while self._clock.monotonic() < deadline:
            record, session = self._record(job, member), self._session_of(job, member)
            if record is None or not record.live:
                return
            if session is None or not session.connected:
                return
            await asyncio.sleep(0.05)

    async def reckon(self) -> None:
        """Lose the members that did not come back some time after a restart of the hub."""
        for job in self._jobs.list():
            for member in job.processes if job.state == JobState.RUNNING else []:
                alone = self._session(job, member.member) is None
                node = self.nodes.get(member.node)
                nodeless = node is None or not node.connected
                if member.live and alone and (nodeless or member.incarnation):
                    await self._lose(job.job, member.member, "it did not come back")

    async def give_up(self, job: str, member: str) -> None:
        """Take a member for stopped whose node did not report its end in time."""
        async with self._locks[job]:
            record = self._record(job, member)
            if record is None or not record.live:
                return
            await self._jobs.update_member(job, member, state=MemberState.STOPPED)
            await self._rounds.gone(job, member, lost=True)
        self._sessions.end(session_id(job, member))
        await self._after(job)

    async def fail(self, job: str, member: str, *, error: dict[str, str]) -> None:
        """Give a member up for good that cannot work, whatever its own process says."""
        async with self._locks[job]:
            record = self._record(job, member)
            if record is None or record.state == MemberState.DONE or record.error == error:
                return
            if record.live:
                await self._rounds.gone(job, member, lost=True)
            await self._jobs.update_member(
                job, member, state=MemberState.FAILED, error=error, failures=MAX_FAILURES
            )
            text = f"{member} is given up: {error.get('what', '')}"
            await self._events.add(job, "member-given-up", text, member=member)
        self._sessions.end(session_id(job, member))
        await self._after(job)

    async def _lose(self, job: str, member: str, why: str, *, incarnation: str = "") -> None:
        """Take a live member for lost, if it is still the process that is meant."""
        async with self._locks[job]:
            record = self._process(job, member)
            if record is None or not record.live:
                return
            if incarnation and record.incarnation != incarnation:
                return
            state = MemberState.LEFT if record.leaving else MemberState.LOST
            await self._jobs.update_member(job, member, state=state)
            text = f"{member} {'has left' if record.leaving else 'is lost'}: {why}"
            await self._events.add(job, f"member-{state}", text, member=member)
            await self._gone(job, member, lost=True)
        await self._after(job)

    async def _gone(self, job: str, process: str, *, lost: bool) -> None:
        """Let rounds know that a member is gone; of followers they know nothing."""
        if not is_follower(process):
            await self._rounds.gone(job, process, lost=lost)

    async def _after(self, job: str) -> None:
        """See what follows for the whole job from the end of a member."""
        await self._checkpoints.member_gone(job)
        await self.changed(job)

    # ------------------------------------------------------------------------ look-ups

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
    """Stand in until placement listens."""
