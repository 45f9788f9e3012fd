"""Drives the round machine of each job; effects are stored before they are sent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, cast

from atoll.clock import Clock
from atoll.errors import EpochChanged, GroupError, HubError
from atoll.hub.jobs.jobs import Job, Member
from atoll.hub.observability.events import Events
from atoll.hub.rounds.groups import Runtimes
from atoll.hub.rounds.runtime import RoundRuntime, RoundWire, restore_runtimes
from atoll.hub.rounds.store import RoundStore
from atoll.hub.rounds.timeline import validate_stats, validate_vote
from atoll.ids import session_id, slot_of
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
from atoll.rounds.member_states import AWAITED
from atoll.rounds.timing import broken_s
from atoll.wire.messages import MemberLost, Registered, RoundJoin, RoundPlan, RoundVote, Verdict

logger = logging.getLogger(__name__)

SILENT_S = 6.0
"""A member silent for three heartbeats is no longer waited for."""

RETURN_S = 15.0
"""Time for members to reconnect after a restart of the hub before they count as silent."""

HELD_UP_S = 2.0
"""A longer pause between two ticks means that the hub itself stalled, not its members."""


class RoundService:
    """Handles RoundJoin and RoundVote messages."""

    def __init__(
        self, *, store: RoundStore, events: Events, clock: Clock, wire: RoundWire,
        relayed: Callable[[str], int] = lambda job: 0, first_grace_s: float = 120.0,
    ) -> None:  # fmt: skip
        """`relayed` returns the bytes relayed for a job so far."""
        self.store, self._events, self._clock, self._wire = store, events, clock, wire
        self._relayed = relayed
        self._first_grace_s = first_grace_s
        self.runtimes = Runtimes()
        self._ticked = clock.monotonic()

    # --------------------------------------------------------------------------------- jobs

    async def open(self, job: Job, *, fresh: bool) -> None:
        """Start the rounds of a job (`fresh`), or reopen them after a restart of the hub."""
        now = self._clock.monotonic()
        runtimes = await restore_runtimes(
            job, store=self.store, now=now, fresh=fresh, first_grace_s=self._first_grace_s,
            groups=self.runtimes.meetings.groups(job),
        )  # fmt: skip
        reducer = self._wire.get(session_id(job.job, "reducer"))
        for runtime in runtimes:
            runtime.machine.reducer_ready = reducer is not None
            runtime.bytes_before = self._relayed(job.job)
            if runtime.machine.attempt is not None:
                attempt = runtime.machine.attempt
                runtime.timeline.recall(attempt.plan, attempt.joins, now)
        self.runtimes.open(job.job, runtimes)

    def close(self, job: str) -> None:
        """Forget an ended job; pending requests get an error."""
        self.runtimes.close(job)

    def machine(self, job: str) -> RoundMachine:
        """Return a job's round machine; raises HubError if the job is not running."""
        return self.runtime(job).machine

    def has(self, job: str) -> bool:
        """Return whether a job's rounds are open."""
        return job in self.runtimes

    def runtime(self, job: str, member: str = "", *, group: int = -1) -> RoundRuntime:
        """Return the runtime of a member, or the first; raises HubError if there is none."""
        first = next(iter(self.runtimes.of(job)), None)
        found = self.runtimes.find(job, member, group) if member else first
        if first is None:
            raise HubError("this job is not running", given=job)
        if found is None:
            raise HubError("this member has no place in a round at present", given=member)
        return found

    # ------------------------------------------------------------------ requests of members

    async def join(self, job: str, member: str, body: RoundJoin) -> RoundPlan:
        """Wait for a plan with this member; raises LeftBehind if the round is committed."""
        runtime = self.runtime(job, member, group=body.group)
        body, odd = validate_stats(body)
        async with runtime.lock:
            self.runtimes.check(runtime, body.closing)
            await self.carry_out(runtime, self.runtimes.gather(runtime))
            now = self._clock.monotonic()
            runtime.machine.saving = runtime.saves.due(now)
            if runtime.machine.verified and self.runtimes.observer is not None:
                runtime.machine.unweighted = self.runtimes.observer.watched(job)
            effects = runtime.join(member, body, now)
            await self._odd(runtime, member, runtime.timeline.joined(member, body, odd, now))
            if runtime.machine.attends(member) and not effects:
                return cast(RoundPlan, runtime.machine.plan)
            future = runtime.plan_for(member)
            await self.carry_out(runtime, effects)
        return await asyncio.shield(future)

    async def vote(self, job: str, member: str, body: RoundVote) -> Verdict:
        """Wait for the verdict on an attempt; a repeated request gets the stored one.

        Raises:
            EpochChanged: the attempt is neither open nor decided.
            GroupError: the vote is invalid; the round continues without the member.
        """
        groups = max(1, len(self.runtimes.of(job)))
        # A member that has moved to another stage may still ask for the verdict on an old attempt.
        runtime = self.runtimes.find(job, member, body.epoch % groups) or self.runtime(job, member)
        body, odd = validate_vote(body)
        async with runtime.lock:
            known = runtime.verdicts.get(body.epoch) or await self.store.verdict(job, body.epoch)
            if known is not None:
                return known
            now = self._clock.monotonic()
            try:
                effects = runtime.machine.vote(member, body, now)
            except EpochChanged:
                raise
            except GroupError:
                await self.carry_out(runtime, runtime.machine.withdraw(member, now))
                raise
            await self._odd(runtime, member, runtime.timeline.voted(member, body, now, odd))
            future = runtime.verdict_on(body.epoch)
            await self.carry_out(runtime, effects)
        return await asyncio.shield(future)

    async def _odd(self, runtime: RoundRuntime, member: str, odd: list[str]) -> None:
        if odd:
            text = f"{member} reported invalid statistics: {', '.join(odd)}; ignored"
            await self._noted(runtime, EventRaised("stats-odd", text, member))

    def expect(self, job: str, member: str) -> None:
        """Record that a process was launched for a member."""
        for runtime in self.runtimes.all_of(job, member):
            runtime.launched(member)

    def back(self, job: str, member: str) -> None:
        """Record that a member considered lost is connected again."""
        for runtime in self.runtimes.all_of(job, member):
            runtime.machine.back(member)

    def working(self, job: str) -> set[str] | None:
        """Return the members that are not recovering the group's state; None: unknown job."""
        if job not in self.runtimes:
            return None
        members = [runtime.machine.members for runtime in self.runtimes.of(job)]
        awaited = {m for group in members for m, s in group.states.items() if s in AWAITED}
        return awaited | self.runtimes.meetings.working(job)

    def may_return(self, job: str) -> bool:
        """Return whether all holders of the state, or all members, are lost but may reconnect.

        The hub's own network may be at fault then; new processes would not find the state.
        """
        runtime = next(iter(self.runtimes.of(job)), None)
        return runtime is not None and not runtime.grouped and runtime.machine.may_return()

    def waiting(self, job: str) -> tuple[list[str], float]:
        """Return the members that the next round waits for, and for how many seconds so far."""
        runtime = next((r for r in self.runtimes.of(job) if r.machine.joins), None)
        if runtime is None or runtime.machine.attempt is not None or runtime.machine.paused:
            return [], 0.0
        waited_s = self._clock.monotonic() - runtime.machine.pending.since()
        return runtime.machine.waits_for(), max(0.0, waited_s)

    def saved(self, job: str) -> None:
        """Record that a checkpoint of a job is complete."""
        for runtime in self.runtimes.of(job):
            runtime.saves.completed(self._clock.monotonic())

    def describe(self, job: str, member: str) -> dict[str, Any]:
        """Return a member's state in the rounds, and its share of a period's steps."""
        runtime = self.runtimes.find(job, member)
        if runtime is None:
            return {"round_state": None, "pace": None}
        committed = [v for v in runtime.verdicts.values() if v.committed]
        pace = max(committed, key=lambda v: v.epoch).pace if committed else {}
        state = runtime.machine.members.states.get(member)
        return {"round_state": state, "pace": pace.get(member, 1.0)}

    async def register(self, job: Job, member: Member) -> Registered:
        """Register a member; return the state of the group."""
        runtime = self.runtime(job.job)
        async with runtime.lock:  # an open decision is then either durable or not visible yet
            machine, leases = runtime.machine, runtime.machine.commit_log.data_slots
            for one in self.runtimes.of(job.job):
                one.machine.register(member.member, dial=member.dial)
            own = leases.lease(member.member) if leases.cursors else None
            # A SWARM's member learns its stage and its donors from the ledger instead.
            takes_part = not runtime.grouped and member.member not in machine.aside
            recover = machine.recovers and takes_part
            return Registered(
                slot=member.slot,
                num_slots=job.slots,
                committed_round=machine.committed_round,
                stopping=machine.stopping,
                # late members need no checkpoint, and it may have been pruned
                resume_round=-1 if machine.recovers else job.resume_round,
                recover=recover,
                lease=None if machine.recovers else own,
                encrypted=job.spec.job.encryption == "on",
                first_epoch=machine.first_epoch if takes_part else 0,
            )

    async def gone(self, job: str, member: str, *, lost: bool) -> None:
        """Stop waiting for a member that was lost or has finished."""
        runtimes = self.runtimes.all_of(job, member)
        self.runtimes.meetings.gone(job, member)
        if runtimes and not lost:  # before the job can end: its files must be complete by then
            await self.store.sum_up(job)
        for runtime in runtimes:
            async with runtime.lock:
                effects = runtime.machine.gone(member, self._clock.monotonic(), lost=lost)
                waiting = runtime.plans.pop(member, None)
                if waiting is not None and not waiting.done():
                    waiting.cancel()
                await self.carry_out(runtime, effects)

    async def leave(self, job: str, member: str) -> None:
        """Handle a member that leaves for good."""
        runtimes = self.runtimes.all_of(job, member)
        self.runtimes.meetings.gone(job, member)
        for runtime in runtimes:
            async with runtime.lock:
                await self.carry_out(
                    runtime, runtime.machine.leave(member, self._clock.monotonic())
                )

    async def reducer_here(self, job: str) -> None:
        """Send a (re)connected reducer the open plan and its lost members."""
        for runtime in self.runtimes.of(job):
            await self._reducer_here(runtime)

    async def _reducer_here(self, runtime: RoundRuntime) -> None:
        job = runtime.job
        async with runtime.lock:
            attempt, address = runtime.machine.attempt, session_id(job, "reducer")
            if attempt is not None and attempt.plan.reducer:
                self._wire.notify(address, attempt.plan)
                for member in sorted(attempt.left, key=slot_of):
                    self._wire.notify(address, MemberLost(job, attempt.plan.epoch, member))
            elif runtime.verdicts:
                self._wire.notify(address, runtime.verdicts[max(runtime.verdicts)])
            await self.carry_out(
                runtime, runtime.machine.reducer(self._clock.monotonic(), ready=True)
            )

    async def reducer_lost(self, job: str) -> None:
        """Notify the members of an open plan that the reducer and its contributions are lost."""
        for runtime in self.runtimes.of(job):
            async with runtime.lock:
                plan = runtime.machine.plan
                if plan is not None and plan.reducer:
                    for member in plan.members:
                        notice = MemberLost(job, plan.epoch, "reducer")
                        self._wire.notify(session_id(job, member), notice)
                runtime.machine.reducer(self._clock.monotonic(), ready=False)

    async def tick(self) -> None:
        """Process silent members, graces and deadlines; called several times a second."""
        now = self._clock.monotonic()
        held_up, self._ticked = now - self._ticked > HELD_UP_S, now
        for runtime in self.runtimes:
            if runtime.lock.locked():
                continue
            try:
                async with runtime.lock:
                    if not held_up:  # otherwise process the input that arrived meanwhile first
                        await self._notice_silence(runtime)
                    await self.carry_out(runtime, self.runtimes.gather(runtime))
                    await self.carry_out(runtime, runtime.machine.settle(self._clock.monotonic()))
            except Exception:  # other jobs, and the rest of the housekeeping, go on
                logger.exception("the rounds of %s failed", runtime.job)

    async def _notice_silence(self, runtime: RoundRuntime) -> None:
        now = self._clock.monotonic()
        for member in runtime.machine.waits_for():
            if self._is_silent(runtime, member, now):
                await self.carry_out(runtime, runtime.machine.silent(member, now))

    def is_here(self, runtime: RoundRuntime, member: str) -> bool:
        """Return whether a member has a session, or may still reconnect to a restarted hub."""
        recent = self._clock.monotonic() - runtime.opened_at <= RETURN_S
        return recent or self._wire.get(session_id(runtime.job, member)) is not None

    def _is_silent(self, runtime: RoundRuntime, member: str, now: float) -> bool:
        session = self._wire.get(session_id(runtime.job, member))
        if session is None:
            return now - runtime.opened_at > RETURN_S
        patience_s = broken_s(runtime.machine.commit_log.timings)
        broken = not session.connected and now - session.gone_since > patience_s
        return bool(broken or now - session.last_seen > SILENT_S)

    # ------------------------------------------------------------------------------ effects

    async def carry_out(self, runtime: RoundRuntime, effects: list[Effect]) -> None:
        """Store each effect, then send it. The caller holds the runtime's lock."""
        for effect in effects:
            await self._acts[type(effect)](self, runtime, effect)

    async def _planned(self, runtime: RoundRuntime, effect: Planned) -> None:
        plan = effect.plan
        runtime.bytes_before = self._relayed(plan.job)
        completed = runtime.timeline.planned(plan, self._clock.monotonic())
        await self.store.add_plan(effect, completed=completed)
        self.runtimes.planned(runtime, effect)
        runtime.closing = max((join.closing for join in effect.joins.values()), default=0)
        runtime.machine.plan_sent(self._clock.monotonic())
        runtime.decided.clear()
        if plan.reducer:
            self._wire.notify(plan.reducer, plan)
        for member in plan.members:
            future = runtime.plans.pop(member, None)
            if future is not None and not future.done():
                future.set_result(plan)

    async def _decided(self, runtime: RoundRuntime, effect: Decided) -> None:
        nbytes = self._relayed(runtime.job) - runtime.bytes_before
        nodes = {m: record.node for m, record in self.store.members(runtime.job).items()}
        rows = runtime.timeline.decided(effect.verdict, nodes, self._clock.monotonic())
        await self.store.add_verdict(runtime.job, effect, nbytes=nbytes, timeline=rows)
        runtime.machine.verdict_sent(effect.verdict, self._clock.monotonic())
        if effect.plan.reducer:
            self._wire.notify(effect.plan.reducer, effect.verdict)
        # members may be waiting for contributions that never arrive
        if not effect.verdict.committed:
            for member in effect.plan.members:
                self._wire.notify(session_id(runtime.job, member), effect.verdict)
        elif effect.plan.saving:
            runtime.saves.requested(self._clock.monotonic())
        runtime.keep(effect.verdict)
        runtime.decided.set()
        if effect.verdict.committed:
            self.runtimes.committed(runtime, effect.verdict)

    async def _adopted(self, runtime: RoundRuntime, effect: StateAdopted) -> None:
        await self.store.set_round(
            runtime.job, effect.round, runtime.machine.commit_log.data_slots.cursors
        )

    async def _refused(self, runtime: RoundRuntime, effect: Refused) -> None:
        runtime.refuse(effect.member, effect.error)

    async def _lost(self, runtime: RoundRuntime, effect: MemberDropped) -> None:
        plan, member = effect.plan, effect.member
        others = [session_id(runtime.job, m) for m in plan.members if m != member]
        for address in [plan.reducer, *others] if effect.tell_members else [plan.reducer]:
            self._wire.notify(address, MemberLost(runtime.job, plan.epoch, member))

    async def _held(self, runtime: RoundRuntime, effect: Paused) -> None:
        await self.store.set_paused(runtime.job, effect.reason)

    async def _noted(self, runtime: RoundRuntime, note: EventRaised) -> None:
        log = logger.error if note.alarm else logger.info
        log("%s: %s", runtime.job, note.text)
        kind = f"alarm:{note.kind}" if note.alarm else note.kind
        await self._events.add(runtime.job, kind, note.text, member=note.member)

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
