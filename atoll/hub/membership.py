"""Who is there: the nodes that joined, and the processes of every job, from launch to last word."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from atoll.clock import Clock
from atoll.errors import AuthError, HubError
from atoll.hub.checkpoints import Checkpoints
from atoll.hub.jobs import Job, Member
from atoll.hub.rounds import LIVE_STATES, Rounds
from atoll.hub.session import Session, Sessions
from atoll.hub.stores import Stores
from atoll.ids import session_id, slot_of
from atoll.wire.messages import (
    Finished,
    NodeInfo,
    Peer,
    ProcessState,
    Register,
    Registered,
    RosterReply,
)

logger = logging.getLogger(__name__)

STOPPED_EXIT_CODE = 75
"""What a worker exits with when it was asked to stop before its work was done."""

LAST_WORDS_S = 3.0
"""How long the `Finished` of a process that exited well may still be under way."""


@dataclass
class Node:
    """A machine that joined."""

    node: str
    info: NodeInfo
    incarnation: str
    connected: bool = True
    last_heard: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


class Membership:
    """Keeps the books of nodes and members, and tells rounds and placement what changed."""

    def __init__(
        self,
        *,
        stores: Stores,
        sessions: Sessions,
        rounds: Rounds,
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
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.nodes: dict[str, Node] = {}
        self.dials: dict[str, list[str]] = {}
        self.changed: Callable[[str], Awaitable[None]] = _ignore
        """Called with a job one of whose members came to an end, or with "" for a node."""

    # ------------------------------------------------------------------------- nodes

    async def node_opened(self, session: Session) -> None:
        """A node agent connected; a new process of it has no children from before."""
        known = self.nodes.get(session.address)
        info = session.info or (known.info if known else NodeInfo("", "", "", ""))
        self.nodes[session.address] = Node(session.address, info, session.incarnation)
        if known is None or not known.connected:
            await self._events.add("", "node-online", f"{session.address} is online")
        if known is not None and known.incarnation != session.incarnation:
            for job, member in self._members_on(session.address):
                if member.state == "starting" and not self._session(job, member.member):
                    await self._lose(job.job, member.member, "its node agent was restarted")
        await self.changed("")

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

    def free_slots(self) -> dict[str, int]:
        """Return how many more processes each connected node takes."""
        used: dict[str, int] = defaultdict(int)
        for job in self._jobs.list():
            if job.state == "running":
                for member in job.members.values():
                    used[member.node] += member.state in LIVE_STATES
        return {
            node.node: max(0, node.info.slots - used[node.node])
            for node in self.nodes.values()
            if node.connected
        }

    # ------------------------------------------------------------------------ members

    async def member_opened(self, session: Session) -> None:
        """A member's process connected."""
        async with self._locks[session.job]:
            record = self._record(session.job, session.member)
            if record is None or record.state not in LIVE_STATES | {"lost"}:
                return
            back = record.state == "lost"
            await self._jobs.update_member(
                session.job, session.member, state="running", incarnation=session.incarnation
            )
            if back:
                text = f"{session.member} is back"
                await self._events.add(session.job, "member-back", text, member=session.member)
                self._rounds.expect(session.job, session.member)

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
            self._rounds.register(session.job, session.member, dial=body.dial)
            self.dials[session.address] = body.dial
            machine = self._rounds.machine(session.job)
            return Registered(
                slot=record.slot,
                num_slots=job.nodes_wanted,
                committed_round=machine.committed_round,
                stopping=machine.stopping,
                resume_round=job.resume_round,
            )

    def roster(self, job: str) -> RosterReply:
        """Return the live members of a job and where they can be dialled."""
        live = self.live(job)
        return RosterReply([Peer(m, self.dials.get(session_id(job, m), [])) for m in live])

    def live(self, job: str) -> list[str]:
        """Return the members of a job that were launched and have not ended, in slot order."""
        members = self._jobs.get(job).members.values()
        return sorted((m.member for m in members if m.state in LIVE_STATES), key=slot_of)

    async def finished(self, session: Session, body: Finished) -> None:
        """A member has said its last words; saying them again changes nothing."""
        async with self._locks[session.job]:
            record = self._record(session.job, session.member)
            if record is None or record.state in ("done", "failed"):
                return
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
        record = self._record(body.job, body.member)
        if record is None:
            return
        if node and record.node != node:
            raise AuthError(
                "this process belongs to another node", given=node, expected=record.node
            )
        if body.state != "exited":
            if record.state in ("assigned", "starting"):
                await self._jobs.update_member(body.job, body.member, state=body.state)
            return
        await self._jobs.update_member(
            body.job,
            body.member,
            exit_code=body.exit_code,
            error=body.error or record.error,
            tail=body.tail,
        )
        await self._exited(body)

    async def _exited(self, body: ProcessState) -> None:
        """Decide what the end of a process means for its member."""
        if body.exit_code == 0:
            await self._hear_last_words(body.job, body.member)
        async with self._locks[body.job]:
            record = self._record(body.job, body.member)
            if record is None or record.state not in LIVE_STATES:
                return
            stopped = body.exit_code == STOPPED_EXIT_CODE or self._jobs.get(body.job).stopping
            state = "done" if body.exit_code == 0 else "stopped" if stopped else "failed"
            await self._jobs.update_member(body.job, body.member, state=state)
            if state == "failed":
                text = f"{body.member} ended with exit status {body.exit_code}"
                await self._events.add(body.job, "member-failed", text, member=body.member)
            await self._rounds.gone(body.job, body.member, lost=state != "done")
        self._sessions.end(session_id(body.job, body.member))
        await self._after(body.job)

    async def _hear_last_words(self, job: str, member: str) -> None:
        """Wait a little for a `Finished` that is still under way on the member's own session."""
        deadline = self._clock.monotonic() + LAST_WORDS_S
        while self._clock.monotonic() < deadline:
            record, session = self._record(job, member), self._session_of(job, member)
            if record is None or record.state not in LIVE_STATES:
                return
            if session is None or not session.connected:
                return
            await asyncio.sleep(0.05)

    async def reckon(self) -> None:
        """Lose the members that did not come back some time after a restart of the hub."""
        for job in self._jobs.list():
            for member in list(job.members.values()) if job.state == "running" else []:
                alone = self._session(job, member.member) is None
                node = self.nodes.get(member.node)
                nodeless = node is None or not node.connected
                if member.state in LIVE_STATES and alone and (nodeless or member.incarnation):
                    await self._lose(job.job, member.member, "it did not come back")

    async def give_up(self, job: str, member: str) -> None:
        """Take a member for stopped whose node did not report its end in time."""
        async with self._locks[job]:
            record = self._record(job, member)
            if record is None or record.state not in LIVE_STATES:
                return
            await self._jobs.update_member(job, member, state="stopped")
            await self._rounds.gone(job, member, lost=True)
        self._sessions.end(session_id(job, member))
        await self._after(job)

    async def _lose(self, job: str, member: str, why: str, *, incarnation: str = "") -> None:
        """Take a live member for lost, if it is still the process that is meant."""
        async with self._locks[job]:
            record = self._record(job, member)
            if record is None or record.state not in LIVE_STATES:
                return
            if incarnation and record.incarnation not in ("", incarnation):
                return
            await self._jobs.update_member(job, member, state="lost")
            text = f"{member} is lost: {why}"
            await self._events.add(job, "member-lost", text, member=member)
            await self._rounds.gone(job, member, lost=True)
        await self._after(job)

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

    def _session(self, job: Job, member: str) -> Session | None:
        return self._session_of(job.job, member)

    def _session_of(self, job: str, member: str) -> Session | None:
        return self._sessions.get(session_id(job, member))

    def _members_on(self, node: str) -> list[tuple[Job, Member]]:
        return [
            (job, member)
            for job in self._jobs.list()
            if job.state == "running"
            for member in job.members.values()
            if member.node == node and member.state in LIVE_STATES
        ]


async def _ignore(job: str) -> None:
    """Stand in until placement listens."""


def describe_member(
    session: Session | None, now: float, *, told: Mapping[str, float]
) -> dict[str, Any]:
    """Return what is known of a member beyond its record; `told` are its newest measurements."""
    return {
        "last_seen_s": max(0.0, now - session.last_heard) if session else None,
        "sent_bytes": int(told.get("sent_bytes", 0)),
        "received_bytes": int(told.get("received_bytes", 0)),
        "connected": session is not None and session.connected,
    }


def describe_node(
    node: Node,
    session: Session | None,
    now: float,
    *,
    running: list[str],
    told: Sequence[Mapping[str, float]],
) -> dict[str, Any]:
    """Return a node as the API shows it; `told` are the newest measurements of its workers."""
    heard = session.last_heard if session else node.last_heard
    stats = session.stats if session else node.stats
    everyone = [stats, *told]
    return {
        "node": node.node,
        "name": node.info.hostname or node.node,
        "state": "online" if session is not None and node.connected else "lost",
        "last_seen_s": max(0.0, now - heard),
        "info": cast(Any, {name: getattr(node.info, name) for name in node.info.__struct_fields__}),
        "stats": stats,
        "sent_bytes": int(sum(s.get("sent_bytes", 0) for s in everyone)),
        "received_bytes": int(sum(s.get("received_bytes", 0) for s in everyone)),
        "tokens_per_s": sum(figures.get("tokens_per_s", 0.0) for figures in told),
        "running": running,
    }
