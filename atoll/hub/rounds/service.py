"""Rounds of every job: the rules of `decisions.py`, made durable before anyone hears of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Protocol, cast

from atoll.clock import Clock
from atoll.errors import EpochChanged, GroupError, HubError
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.observability.events import Events
from atoll.hub.rounds.runtime import RoundRuntime, restore_runtime
from atoll.hub.rounds.store import RoundStore
from atoll.hub.rounds.timeline import validate_stats
from atoll.ids import session_id
from atoll.rounds.effects import (
    Decided,
    Effect,
    EventRaised,
    MemberDropped,
    Paused,
    Planned,
    Refused,
    StateAdopted,
)
from atoll.rounds.machine import RoundMachine
from atoll.rounds.state import AWAITED
from atoll.rounds.timing import broken_s
from atoll.wire.messages import (
    MemberLost,
    Message,
    Registered,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
)

__all__ = ["RoundService", "RoundWire"]

logger = logging.getLogger(__name__)

SILENT_S = 6.0
"""An awaited member of which nothing was heard for three heartbeats is not waited for."""

RETURN_S = 15.0
"""How long members may take to reconnect after a restart of the hub before they count as silent."""

HELD_UP_S = 2.0
"""A longer pause between two ticks says that the hub stood still, not its members."""


class RoundWire(Protocol):
    """What rounds need of the rest of the hub."""

    def notify(self, address: str, body: Message) -> bool:
        """Queue a notice for a session."""
        ...

    def get(self, address: str) -> Any:
        """Return the session at an address, or None."""
        ...


class RoundService:
    """Answers RoundJoin and RoundVote."""

    def __init__(
        self,
        *,
        book: RoundStore,
        events: Events,
        clock: Clock,
        wire: RoundWire,
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
        self._rooms: dict[str, RoundRuntime] = {}
        self._ticked = clock.monotonic()

    # ------------------------------------------------------------------- jobs come and go

    async def open(self, job: Job, *, fresh: bool) -> None:
        """Begin the rounds of a job (`fresh`), or take them up where the hub's last life ended."""
        now = self._clock.monotonic()
        room = await restore_runtime(
            job, book=self.book, now=now, fresh=fresh, first_grace_s=self._first_grace_s
        )
        reducer = self._wire.get(session_id(job.job, "reducer"))
        room.machine.reducer_ready = reducer is not None
        room.bytes_before = self._relayed(job.job)
        if room.machine.attempt is not None:
            attempt = room.machine.attempt
            room.timeline.recall(attempt.plan, attempt.joins, now)
        self._rooms[job.job] = room

    def close(self, job: str) -> None:
        """Forget a job that has ended; whoever still waits is told so."""
        room = self._rooms.pop(job, None)
        if room is not None:
            room.close()

    def machine(self, job: str) -> RoundMachine:
        """Return a job's round machine; raises HubError if the job is not running."""
        return self.room(job).machine

    def has(self, job: str) -> bool:
        """Return whether a job's rounds are open."""
        return job in self._rooms

    def room(self, job: str) -> RoundRuntime:
        """Return a job's runtime; raises HubError if the job is not running."""
        try:
            return self._rooms[job]
        except KeyError:
            raise HubError("this job is not running", given=job) from None

    # ------------------------------------------------------------------- what members ask

    async def join(self, job: str, member: str, body: RoundJoin) -> RoundPlan:
        """Wait until the round has a plan with this member in it.

        Raises:
            LeftBehind: the group committed this round without the member.
        """
        room = self.room(job)
        body, odd = validate_stats(body)
        async with room.lock:
            now = self._clock.monotonic()
            effects = room.machine.join(member, body, now)
            if odd := room.timeline.joined(member, body, odd, now):
                await self._name_odd(room, member, odd)
            if room.machine.attends(member) and not effects:
                return cast(RoundPlan, room.machine.plan)
            future = room.plan_for(member)
            await self.carry_out(room, effects)
        return await asyncio.shield(future)

    async def vote(self, job: str, member: str, body: RoundVote) -> Verdict:
        """Wait for the verdict on an attempt; asked again, it is the stored one.

        Raises:
            EpochChanged: that attempt is neither open nor decided.
            GroupError: the vote cannot be true; the round goes on without the member.
        """
        room = self.room(job)
        async with room.lock:
            known = room.verdicts.get(body.epoch) or await self.book.verdict(job, body.epoch)
            if known is not None:
                return known
            now = self._clock.monotonic()
            try:
                effects = room.machine.vote(member, body, now)
            except EpochChanged:
                raise
            except GroupError:
                await self.carry_out(room, room.machine.withdraw(member, now))
                raise
            room.timeline.voted(member, body.epoch, now)
            future = room.verdict_on(body.epoch)
            await self.carry_out(room, effects)
        return await asyncio.shield(future)

    # ------------------------------------------------------------------- what happened

    def expect(self, job: str, member: str) -> None:
        """A process was launched for a member."""
        if job in self._rooms:
            self._rooms[job].machine.launch(member)

    def back(self, job: str, member: str) -> None:
        """The process of a member that was taken for lost speaks again."""
        if job in self._rooms:
            self._rooms[job].machine.back(member)

    def working(self, job: str) -> set[str] | None:
        """Return the members that are not merely on their way to the group's state."""
        room = self._rooms.get(job)
        if room is None:
            return None
        return {m for m, s in room.machine.roll.standing.items() if s in AWAITED}

    def may_return(self, job: str) -> bool:
        """Return whether all that had the state, or all members, are lost and may come back.

        Then the hub's own network may have been cut: new processes would not find the state.
        """
        room = self._rooms.get(job)
        if room is None:
            return False
        roll = room.machine.roll
        if room.machine.recovers:
            return not roll.holders("", ()) and bool(roll.missed())
        return all(standing == "gone" for standing in roll.standing.values())

    def waiting(self, job: str) -> tuple[list[str], float]:
        """Return whom the next round waits for, and for how many seconds by now."""
        room = self._rooms.get(job)
        if room is None or room.machine.attempt is not None or room.machine.paused:
            return [], 0.0
        if not room.machine.joins:
            return [], 0.0
        waited_s = self._clock.monotonic() - room.machine.lobby.since()
        return room.machine.waits_for(), max(0.0, waited_s)

    def describe(self, job: str, member: str) -> dict[str, Any]:
        """Return what a member does in the rounds, and its share of a period's steps."""
        room = self._rooms.get(job)
        if room is None:
            return {"standing": "", "pace": None}
        committed = [v for v in room.verdicts.values() if v.committed]
        pace = max(committed, key=lambda v: v.epoch).pace if committed else {}
        standing = room.machine.roll.standing.get(member, "")
        return {"standing": standing, "pace": pace.get(member, 1.0)}

    async def register(self, job: Job, member: Member) -> Registered:
        """A member entered its job; return where the group stands."""
        room = self.room(job.job)
        async with room.lock:  # what is being decided just now is durable, or not known yet
            machine, leases = room.machine, room.machine.progress.leases
            machine.register(member.member, dial=member.dial)
            own = leases.lease(member.member) if leases.cursors else None
            recover = machine.recovers and member.member not in machine.aside
            return Registered(
                slot=member.slot,
                num_slots=job.slots,
                committed_round=machine.committed_round,
                stopping=machine.stopping,
                # Who comes late needs no checkpoint, and that one may be pruned by now.
                resume_round=-1 if machine.recovers else job.resume_round,
                recover=recover,
                lease=None if machine.recovers else own,
            )

    async def gone(self, job: str, member: str, *, lost: bool) -> None:
        """A member was lost, or has finished; the others stop waiting for it."""
        room = self._rooms.get(job)
        if room is None:
            return
        if not lost:  # before the job can be done: whoever fetches its files then finds all
            await self.book.sum_up(job)
        async with room.lock:
            effects = room.machine.gone(member, self._clock.monotonic(), lost=lost)
            waiting = room.plans.pop(member, None)
            if waiting is not None and not waiting.done():
                waiting.cancel()
            await self.carry_out(room, effects)

    async def leave(self, job: str, member: str) -> None:
        """A member told that it leaves for good."""
        room = self._rooms.get(job)
        if room is not None:
            async with room.lock:
                await self.carry_out(room, room.machine.leave(member, self._clock.monotonic()))

    async def reducer_here(self, job: str) -> None:
        """A reducer (re)connected: it is told the open plan, and who of it is lost."""
        room = self._rooms.get(job)
        if room is None:
            return
        async with room.lock:
            plan, address = room.machine.plan, session_id(job, "reducer")
            if plan is not None and plan.reducer:
                self._wire.notify(address, plan)
                for member in room.lost:
                    self._wire.notify(address, MemberLost(job, plan.epoch, member))
            elif room.verdicts:
                self._wire.notify(address, room.verdicts[max(room.verdicts)])
            await self.carry_out(room, room.machine.reducer(self._clock.monotonic(), ready=True))

    async def reducer_lost(self, job: str) -> None:
        """The reducer of a job is gone with what it held: members of an open plan are told."""
        room = self._rooms.get(job)
        if room is None:
            return
        async with room.lock:
            plan = room.machine.plan
            if plan is not None and plan.reducer:
                for member in plan.members:
                    notice = MemberLost(job, plan.epoch, "reducer")
                    self._wire.notify(session_id(job, member), notice)
            room.machine.reducer(self._clock.monotonic(), ready=False)

    async def tick(self) -> None:
        """Act on silence, graces and deadlines; called several times a second."""
        now = self._clock.monotonic()
        held_up, self._ticked = now - self._ticked > HELD_UP_S, now
        for room in list(self._rooms.values()):
            if not room.lock.locked():
                async with room.lock:
                    if not held_up:  # else what came in meanwhile is read first
                        await self._notice_silence(room)
                    await self.carry_out(room, room.machine.settle(self._clock.monotonic()))

    async def _notice_silence(self, room: RoundRuntime) -> None:
        now = self._clock.monotonic()
        for member in room.machine.waits_for():
            if self._is_silent(room, member, now):
                await self.carry_out(room, room.machine.silent(member, now))

    def is_here(self, room: RoundRuntime, member: str) -> bool:
        """Return whether a member has a session, or may still come back to a hub that restarted."""
        recent = self._clock.monotonic() - room.opened_at <= RETURN_S
        return recent or self._wire.get(session_id(room.job, member)) is not None

    def _is_silent(self, room: RoundRuntime, member: str, now: float) -> bool:
        """Return whether a member's process stands still or its connection broke."""
        session = self._wire.get(session_id(room.job, member))
        if session is None:
            return now - room.opened_at > RETURN_S
        if not session.connected and now - session.gone_since > broken_s(
            room.machine.progress.measures
        ):
            return True
        return bool(now - session.last_heard > SILENT_S)

    # ------------------------------------------------------------------- consequences

    async def carry_out(self, room: RoundRuntime, effects: list[Effect]) -> None:
        """Store each consequence, then tell it. The caller holds the room's lock."""
        for effect in effects:
            await self._acts[type(effect)](self, room, effect)

    async def _planned(self, room: RoundRuntime, effect: Planned) -> None:
        plan = effect.plan
        room.bytes_before = self._relayed(plan.job)
        completed = room.timeline.planned(plan, self._clock.monotonic())
        await self.book.add_plan(effect, completed=completed)
        room.lost.clear()
        room.decided.clear()
        if plan.reducer:
            self._wire.notify(plan.reducer, plan)
        for member in plan.members:
            future = room.plans.pop(member, None)
            if future is not None and not future.done():
                future.set_result(plan)

    async def _decided(self, room: RoundRuntime, effect: Decided) -> None:
        nbytes = self._relayed(room.job) - room.bytes_before
        nodes = {m: record.node for m, record in self.book.members(room.job).items()}
        rows = room.timeline.decided(effect.verdict, nodes, self._clock.monotonic())
        await self.book.add_verdict(room.job, effect, nbytes=nbytes, timeline=rows)
        if effect.plan.reducer:
            self._wire.notify(effect.plan.reducer, effect.verdict)
        if not effect.verdict.committed:  # some may wait for contributions that never come
            for member in effect.plan.members:
                self._wire.notify(session_id(room.job, member), effect.verdict)
        room.keep(effect.verdict)
        room.decided.set()

    async def _adopted(self, room: RoundRuntime, effect: StateAdopted) -> None:
        await self.book.set_round(room.job, effect.round, room.machine.progress.leases.cursors)

    async def _refused(self, room: RoundRuntime, effect: Refused) -> None:
        room.refuse(effect.member, effect.error)

    async def _lost(self, room: RoundRuntime, effect: MemberDropped) -> None:
        plan, member = effect.plan, effect.member
        room.lost.append(member)
        told = [session_id(room.job, m) for m in plan.members if m != member]
        for address in [plan.reducer, *told] if effect.tell_members else [plan.reducer]:
            self._wire.notify(address, MemberLost(room.job, plan.epoch, member))

    async def _held(self, room: RoundRuntime, effect: Paused) -> None:
        await self.book.set_paused(room.job, effect.reason)

    async def _noted(self, room: RoundRuntime, note: EventRaised) -> None:
        log = logger.error if note.alarm else logger.info
        log("%s: %s", room.job, note.text)
        kind = f"alarm:{note.kind}" if note.alarm else note.kind
        await self._events.add(room.job, kind, note.text, member=note.member)

    async def _name_odd(self, room: RoundRuntime, member: str, odd: list[str]) -> None:
        """Tell which figures of a member are left out because they cannot be."""
        text = f"{member} tells what cannot be: {', '.join(odd)}; it is left out"
        await self._events.add(room.job, "account-odd", text, member=member)

    _acts: ClassVar[
        dict[type[Any], Callable[[RoundService, RoundRuntime, Any], Awaitable[None]]]
    ] = {
        Planned: _planned,
        Decided: _decided,
        StateAdopted: _adopted,
        Refused: _refused,
        MemberDropped: _lost,
        Paused: _held,
        EventRaised: _noted,
    }
