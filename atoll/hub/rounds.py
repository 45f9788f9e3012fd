"""Rounds of every job: the rules of `decisions.py`, made durable before anyone hears of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from atoll.clock import Clock
from atoll.config import parse_spec
from atoll.errors import GroupError, HubError
from atoll.hub.decisions import Decided, Effect, JobRounds, Noted, Planned, Refused
from atoll.hub.events import Events
from atoll.hub.jobs import Job
from atoll.hub.round_book import RoundBook
from atoll.ids import session_id
from atoll.wire.messages import MemberLost, Message, RoundJoin, RoundPlan, RoundVote, Verdict

logger = logging.getLogger(__name__)

LIVE_STATES = frozenset({"assigned", "starting", "running"})
KEPT_VERDICTS = 64


class Wire(Protocol):
    """What rounds need of the rest of the hub."""

    def notify(self, address: str, body: Message) -> bool:
        """Queue a notice for a session."""
        ...

    def get(self, address: str) -> Any:
        """Return the session at an address, or None."""
        ...


@dataclass(eq=False)
class Room:
    """One job's rounds, and who waits for what."""

    machine: JobRounds
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from an occurrence until its consequences are durable and told."""
    plans: dict[str, asyncio.Future[RoundPlan]] = field(default_factory=dict)
    votes: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """The newest verdicts by epoch; older ones are in the database."""
    lost: list[str] = field(default_factory=list)
    """Members of the open plan that were lost, for a reducer that comes back."""
    bytes_before: int = 0


class Rounds:
    """Answers RoundJoin and RoundVote."""

    def __init__(
        self,
        *,
        book: RoundBook,
        events: Events,
        clock: Clock,
        wire: Wire,
        relayed: Callable[[str], int] = lambda job: 0,
        first_grace_s: float = 120.0,
    ) -> None:
        """Speak through `wire`; `relayed` tells how many bytes a job has sent so far."""
        self.book = book
        self._events = events
        self._clock = clock
        self._wire = wire
        self._relayed = relayed
        self._first_grace_s = first_grace_s
        self._rooms: dict[str, Room] = {}

    # ------------------------------------------------------------------- jobs come and go

    async def open(self, job: Job, *, fresh: bool) -> None:
        """Begin the rounds of a job (`fresh`), or take them up where the hub's last life ended."""
        name = job.job
        if fresh:
            await self.book.abandon(name)
        rows = await self.book.newest(name, limit=KEPT_VERDICTS)
        machine = JobRounds(
            name,
            nodes_wanted=job.nodes_wanted,
            preference=parse_spec(job.spec).job.route,
            committed_round=job.committed_round,
            epoch=rows[0][0].epoch if rows else 0,
            first_grace_s=self._first_grace_s,
            starting=fresh or not rows,
            stopping=job.stopping,
            reducer_ready=self._wire.get(session_id(name, "reducer")) is not None,
        )
        room = Room(machine, bytes_before=self._relayed(name))
        room.verdicts = {plan.epoch: verdict for plan, verdict in rows if verdict is not None}
        for member in job.members.values():
            if member.state in LIVE_STATES:
                machine.expect(member.member)
        if rows and rows[0][1] is None:
            machine.reopen(rows[0][0], self._clock.monotonic())
        self._rooms[name] = room

    def close(self, job: str) -> None:
        """Forget a job that has ended; whoever still waits is told so."""
        room = self._rooms.pop(job, None)
        if room is None:
            return
        waiting: list[asyncio.Future[Any]] = [*room.plans.values(), *room.votes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GroupError("the job has ended", given=job))
                future.exception()

    def machine(self, job: str) -> JobRounds:
        """Return where a job's rounds stand.

        Raises:
            HubError: the job is not running.
        """
        return self._room(job).machine

    def has(self, job: str) -> bool:
        """Return whether a job's rounds are open."""
        return job in self._rooms

    # ------------------------------------------------------------------- what members ask

    async def join(self, job: str, member: str, body: RoundJoin) -> RoundPlan:
        """Wait until the round has a plan with this member in it.

        Raises:
            LeftBehind: the group committed this round without the member.
        """
        room = self._room(job)
        async with room.lock:
            effects = room.machine.join(member, body, self._clock.monotonic())
            if room.machine.attends(member) and not effects:
                return cast(RoundPlan, room.machine.plan)
            future = room.plans.get(member)
            if future is None or future.done():
                future = asyncio.get_running_loop().create_future()
                room.plans[member] = future
            await self._carry_out(room, effects)
        return await asyncio.shield(future)

    async def vote(self, job: str, member: str, body: RoundVote) -> Verdict:
        """Wait for the verdict on an attempt; asked again, it is the stored one.

        Raises:
            EpochChanged: that attempt is neither open nor decided.
        """
        room = self._room(job)
        async with room.lock:
            known = room.verdicts.get(body.epoch) or await self.book.verdict(job, body.epoch)
            if known is not None:
                return known
            effects = room.machine.vote(member, body, self._clock.monotonic())
            future = room.votes.get(body.epoch)
            if future is None:
                future = asyncio.get_running_loop().create_future()
                room.votes[body.epoch] = future
            await self._carry_out(room, effects)
        return await asyncio.shield(future)

    # ------------------------------------------------------------------- what happened

    def expect(self, job: str, member: str) -> None:
        """A process was launched: rounds wait for it."""
        if job in self._rooms:
            self._rooms[job].machine.expect(member)

    def register(self, job: str, member: str, *, dial: list[str]) -> None:
        """A member entered its job."""
        self._room(job).machine.register(member, dial=dial)

    async def gone(self, job: str, member: str, *, lost: bool) -> None:
        """A member was lost, or has finished; the others stop waiting for it."""
        room = self._rooms.get(job)
        if room is None:
            return
        async with room.lock:
            plan = room.machine.plan
            if plan is not None and member in plan.members:
                room.lost.append(member)
                told = [session_id(job, m) for m in plan.members if m != member]
                for address in [plan.reducer, *told] if lost else [plan.reducer]:
                    self._wire.notify(address, MemberLost(job, plan.epoch, member))
            effects = room.machine.gone(member, self._clock.monotonic())
            waiting = room.plans.pop(member, None)
            if waiting is not None and not waiting.done():
                waiting.cancel()
            await self._carry_out(room, effects)

    async def reducer_here(self, job: str) -> None:
        """A reducer (re)connected: it is told the open plan, and who of it is lost."""
        room = self._rooms.get(job)
        if room is None:
            return
        async with room.lock:
            plan, address = room.machine.plan, session_id(job, "reducer")
            if plan is not None and plan.route == "relay":
                self._wire.notify(address, plan)
                for member in room.lost:
                    self._wire.notify(address, MemberLost(job, plan.epoch, member))
            elif room.verdicts:
                self._wire.notify(address, room.verdicts[max(room.verdicts)])
            await self._carry_out(room, room.machine.reducer(self._clock.monotonic(), ready=True))

    async def reducer_lost(self, job: str) -> None:
        """The reducer of a job is gone with what it held: members of an open plan are told."""
        room = self._rooms.get(job)
        if room is None:
            return
        async with room.lock:
            plan = room.machine.plan
            if plan is not None and plan.route == "relay":
                for member in plan.members:
                    notice = MemberLost(job, plan.epoch, "reducer")
                    self._wire.notify(session_id(job, member), notice)
            room.machine.reducer(self._clock.monotonic(), ready=False)

    async def tick(self) -> None:
        """Act on graces and deadlines that have passed; called about once a second."""
        for room in list(self._rooms.values()):
            if not room.lock.locked():
                async with room.lock:
                    await self._carry_out(room, room.machine.settle(self._clock.monotonic()))

    # ------------------------------------------------------------------- consequences

    async def _carry_out(self, room: Room, effects: list[Effect]) -> None:
        """Store each consequence, then tell it. The caller holds the room's lock."""
        for effect in effects:
            if isinstance(effect, Planned):
                room.bytes_before = self._relayed(effect.plan.job)
                await self.book.add_plan(effect.plan)
                self._tell_plan(room, effect.plan)
            elif isinstance(effect, Decided):
                job = room.machine.job
                nbytes = self._relayed(job) - room.bytes_before
                await self.book.add_verdict(job, effect, nbytes=nbytes)
                self._tell_verdict(room, effect)
            elif isinstance(effect, Refused):
                future = room.plans.pop(effect.member, None)
                if future is not None and not future.done():
                    future.set_exception(effect.error)
                    future.exception()
            else:
                await self._note(room.machine.job, effect)

    async def _note(self, job: str, note: Noted) -> None:
        log = logger.error if note.alarm else logger.info
        log("%s: %s", job, note.text)
        kind = f"alarm:{note.kind}" if note.alarm else note.kind
        await self._events.add(job, kind, note.text, member=note.member)

    def _tell_plan(self, room: Room, plan: RoundPlan) -> None:
        room.lost.clear()
        if plan.reducer:
            self._wire.notify(plan.reducer, plan)
        for member in plan.members:
            future = room.plans.pop(member, None)
            if future is not None and not future.done():
                future.set_result(plan)

    def _tell_verdict(self, room: Room, decided: Decided) -> None:
        verdict = decided.verdict
        room.verdicts[verdict.epoch] = verdict
        while len(room.verdicts) > KEPT_VERDICTS:
            del room.verdicts[min(room.verdicts)]
        if decided.plan.reducer:
            self._wire.notify(decided.plan.reducer, verdict)
        future = room.votes.pop(verdict.epoch, None)
        if future is not None and not future.done():
            future.set_result(verdict)

    def _room(self, job: str) -> Room:
        try:
            return self._rooms[job]
        except KeyError:
            raise HubError("this job is not running", given=job) from None
