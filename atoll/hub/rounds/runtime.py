"""One job's rounds while the hub lives: where they stand, and which requests wait for what.

Opens the rounds of a job: afresh, or where an earlier life of the hub left them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from atoll.errors import GroupError
from atoll.hub.jobs.jobs import Job
from atoll.hub.rounds.store import RoundStore
from atoll.hub.rounds.timeline import Timeline
from atoll.rounds.checks import LEAVING, RECOVERING
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.machine import RoundMachine
from atoll.wire.messages import RoundPlan, Verdict
from atoll.wire.states import MemberState

KEPT_VERDICTS = 64

ENDED = "the job has ended"
QUIET = frozenset({ENDED, LEAVING, RECOVERING})
"""Ends of a wait that are nobody's fault."""


@dataclass(eq=False)
class RoundRuntime:
    """One job's rounds, and who waits for what."""

    machine: RoundMachine
    opened_at: float
    """Monotonic time at which this life of the hub took the job up."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from an occurrence until its consequences are durable and told."""
    plans: dict[str, asyncio.Future[RoundPlan]] = field(default_factory=dict)
    votes: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """The newest verdicts by epoch; older ones are in the database."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """No attempt is open."""
    lost: list[str] = field(default_factory=list)
    """Members of the open plan that were lost, for a reducer that comes back."""
    bytes_before: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    """Where the time goes; decides nothing."""

    @property
    def job(self) -> str:
        """The job."""
        return self.machine.job

    def plan_for(self, member: str) -> asyncio.Future[RoundPlan]:
        """Return what the member waits for in a join; asked again, the same."""
        future = self.plans.get(member)
        if future is None or future.done():
            future = asyncio.get_running_loop().create_future()
            self.plans[member] = future
        return future

    def verdict_on(self, epoch: int) -> asyncio.Future[Verdict]:
        """Return what all voters of an attempt wait for."""
        if epoch not in self.votes:
            self.votes[epoch] = asyncio.get_running_loop().create_future()
        return self.votes[epoch]

    def refuse(self, member: str, error: GroupError) -> None:
        """End the wait of a member in a join."""
        future = self.plans.pop(member, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()

    def keep(self, verdict: Verdict) -> None:
        """Remember a verdict for those who ask again, and answer those who wait."""
        self.verdicts[verdict.epoch] = verdict
        while len(self.verdicts) > KEPT_VERDICTS:
            del self.verdicts[min(self.verdicts)]
        future = self.votes.pop(verdict.epoch, None)
        if future is not None and not future.done():
            future.set_result(verdict)

    def close(self) -> None:
        """End every wait: the job is over."""
        self.decided.set()
        waiting: list[asyncio.Future[Any]] = [*self.plans.values(), *self.votes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GroupError(ENDED, given=self.job))
                future.exception()


Rows = list[tuple[RoundPlan, Verdict | None]]


async def restore_runtime(
    job: Job, *, book: RoundStore, now: float, fresh: bool, first_grace_s: float
) -> RoundRuntime:
    """Return the rounds of a job.

    Args:
        job: Its record.
        book: Where plans and verdicts are kept.
        now: Present time.
        fresh: It starts now; attempts without a verdict are aborted. Else they are taken up.
        first_grace_s: How long the first round waits for members that are still starting.
    """
    if fresh:
        await book.abandon(job.job)
    rows = await book.newest(job.job, limit=KEPT_VERDICTS)
    machine = RoundMachine(
        job.job,
        nodes_wanted=job.nodes_wanted - len(job.aside),
        min_nodes=max(0, job.min_nodes - len(job.aside)),
        aside=job.aside,
        preference=job.spec.job.route,
        committed_round=job.committed_round,
        start_round=job.start_round,
        epoch=rows[0][0].epoch if rows else 0,
        first_grace_s=first_grace_s,
        starting=fresh or not rows,
        unproved=not fresh,
        stopping=job.stopping,
        paused=job.paused,
        progress=CommitLog(
            job.measures,
            DataSlots(job.slots, dict(job.leases)),
            paced=job.spec.train.pace == "measured",
        ),
    )
    room = RoundRuntime(machine, now)
    room.verdicts = {plan.epoch: verdict for plan, verdict in rows if verdict is not None}
    room.decided.set()
    _enrol(machine, job, fresh=fresh)
    if fresh and job.leases:
        machine.progress.leases.renew(machine.roll.standing)
    if not fresh:
        _recall(machine, rows)
        await _reopen(room, rows, book, now)
    return room


def _enrol(machine: RoundMachine, job: Job, *, fresh: bool) -> None:
    """Take over from the record who lives, and where each can be dialled."""
    for member in job.members.values():
        name, roll = member.member, machine.roll
        if name in machine.aside:
            continue
        machine.dials[name] = member.dial
        if member.live:
            machine.expect(name)
            if member.leaving:
                roll.leaving.add(name)
            if member.incarnation and not fresh:
                roll.standing[name] = "live"
        elif member.state == MemberState.LOST and not fresh:
            roll.standing[name] = "gone"  # it may come back yet
        if job.outsiders.get(name) == member.attempt and not fresh:
            roll.outsiders.add(name)


def _recall(machine: RoundMachine, rows: Rows) -> None:
    """Take over from the record who stands on the committed state, and holds which data.

    Without a verdict on it (it was adopted, or the run was set back) everybody may.
    """
    committed = [(plan, v) for plan, v in rows if v is not None and v.committed]
    if committed and committed[0][1].round + 1 == machine.committed_round:
        plan, verdict = committed[0]
        machine.roll.recorded = set(plan.members) & set(verdict.contributors)
        held = {m: lease.slot for m, lease in verdict.leases.items()}
        machine.progress.leases.held = held
    else:
        there = {m for m, s in machine.roll.standing.items() if s in ("live", "gone")}
        machine.roll.recorded = there - machine.roll.outsiders


async def _reopen(room: RoundRuntime, rows: Rows, book: RoundStore, now: float) -> None:
    """Take up the attempt that was open."""
    if not rows or rows[0][1] is not None:
        return
    machine, plan = room.machine, rows[0][0]
    if plan.round < machine.committed_round:  # decided, but neither stored nor told
        machine.committed_round = plan.round
        cursors = await book.cursors_at(machine.job, plan.round)
        await book.set_round(machine.job, plan.round, cursors)
        machine.progress.set_back(cursors)
    machine.reopen(plan, now, await book.joins_of(plan))
    room.decided.clear()
