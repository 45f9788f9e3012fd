"""The runtime of one job's rounds: the round machine and the requests that wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.errors import GroupError, LeftBehind
from atoll.hub.jobs.jobs import Job
from atoll.hub.rounds.save_schedule import SaveSchedule
from atoll.hub.rounds.store import RoundStore
from atoll.hub.rounds.timeline import Timeline
from atoll.rounds.checks import BEHIND, LEAVING, RECOVERING
from atoll.rounds.commit import CommitLog
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import Effect
from atoll.rounds.machine import RoundMachine
from atoll.rounds.timing import FixedWaits
from atoll.wire.messages import Message, RoundJoin, RoundPlan, Verdict
from atoll.wire.states import MemberState, RoundMemberState

KEPT_VERDICTS = 64
MODULE_WAITS = FixedWaits(grace_s=60.0, hold_s=10.0, timeout_s=300.0)
"""Time limits of the rounds of modules: members meet in several, one after the other."""

ENDED = "the job has ended"
QUIET = frozenset({ENDED, LEAVING, RECOVERING, BEHIND})
"""Reasons for ending a wait that are not errors; catching up has an event of its own."""


class RoundWire(Protocol):
    """What rounds need of the sessions."""

    def notify(self, address: str, body: Message) -> bool:
        """Queue a notice for a session."""
        ...

    def get(self, address: str) -> Any:
        """Return the session at an address, or None."""
        ...


@dataclass(eq=False)
class RoundRuntime:
    """One job's round machine and its waiting requests."""

    machine: RoundMachine
    opened_at: float
    """Monotonic time at which this hub process opened the job."""
    saves: SaveSchedule
    closing: int = 0
    """What the members of the open plan meet for, see `Meeting`."""
    grouped: bool = False
    """Its members are decided by `Meetings`, not by who is launched."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held from an input until its effects are stored and sent."""
    plans: dict[str, asyncio.Future[RoundPlan]] = field(default_factory=dict)
    votes: dict[int, asyncio.Future[Verdict]] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """The newest verdicts by epoch; older ones are in the database."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no attempt is open."""
    bytes_before: int = 0
    joined: set[str] = field(default_factory=set)
    """Members that have joined a round since they were launched; for display only."""
    late: set[str] = field(default_factory=set)
    """Members that came too late for a round and have not caught up yet; for display only."""
    timeline: Timeline = field(default_factory=Timeline)
    """For display only."""
    closed: bool = False
    """The job has ended; a request may have waited for the lock meanwhile."""

    @property
    def job(self) -> str:
        """Id of the job."""
        return self.machine.job

    def launched(self, member: str) -> None:
        """Record that a process was launched for a member."""
        self.machine.launch(member)
        self.joined.discard(member)
        self.late.discard(member)

    def join(self, member: str, body: RoundJoin, now: float) -> list[Effect]:
        """Pass a member's join on; raises LeftBehind if it is late, and remembers that."""
        try:
            effects = self.machine.join(member, body, now)
        except LeftBehind as error:
            if member in self.joined and error.what == BEHIND:
                self.late.add(member)
            raise
        self.joined.add(member)
        return effects

    def plan_for(self, member: str) -> asyncio.Future[RoundPlan]:
        """Return the future that answers a member's join; the same for a repeated request."""
        self.check_open()
        future = self.plans.get(member)
        if future is None or future.done():
            future = asyncio.get_running_loop().create_future()
            self.plans[member] = future
        return future

    def verdict_on(self, epoch: int) -> asyncio.Future[Verdict]:
        """Return the future that answers all votes on an attempt."""
        self.check_open()
        if epoch not in self.votes:
            self.votes[epoch] = asyncio.get_running_loop().create_future()
        return self.votes[epoch]

    def refuse(self, member: str, error: GroupError) -> None:
        """Fail the pending join of a member."""
        future = self.plans.pop(member, None)
        if future is not None and not future.done():
            future.set_exception(error)
            future.exception()

    def keep(self, verdict: Verdict) -> None:
        """Store a verdict for repeated requests, and answer pending votes."""
        self.verdicts[verdict.epoch] = verdict
        while len(self.verdicts) > KEPT_VERDICTS:
            del self.verdicts[min(self.verdicts)]
        future = self.votes.pop(verdict.epoch, None)
        if future is not None and not future.done():
            future.set_result(verdict)

    def check_open(self) -> None:
        """Raise GroupError if the job has ended."""
        if self.closed:
            raise GroupError(ENDED, given=self.job)

    def close(self) -> None:
        """Fail every pending request, and later ones, because the job has ended."""
        self.closed = True
        self.decided.set()
        waiting: list[asyncio.Future[Any]] = [*self.plans.values(), *self.votes.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(GroupError(ENDED, given=self.job))
                future.exception()


Rows = list[tuple[RoundPlan, Verdict | None]]


async def restore_runtimes(
    job: Job, *, store: RoundStore, now: float, fresh: bool, first_grace_s: float, groups: int = 0
) -> list[RoundRuntime]:
    """Return the rounds of a job; `fresh` aborts attempts without a verdict, else they reopen.

    `first_grace_s` is how long the first round waits for members that are still starting.
    `groups` 0: one group of all members; otherwise the members of each are decided elsewhere.
    """
    if fresh:
        await store.abandon(job.job)
    count = max(1, groups)
    rows = await store.newest(job.job, limit=KEPT_VERDICTS * count)
    runtimes = []
    for group in range(count):
        mine = [row for row in rows if row[0].group == group]
        machine = _machine(job, mine, fresh=fresh, first_grace_s=first_grace_s)
        if groups:
            newest = max((plan.epoch for plan, _ in rows), default=0)
            machine.group, machine.groups = group, groups
            machine.whole = job.spec.meets_every_step
            # The next epoch is above all so far, even if the number of groups has changed.
            machine.epoch = newest // groups * groups + group
            machine.nodes_wanted, machine.min_nodes, machine.starting = 1, 0, False
            machine.stopping = False
            if job.spec.dipaco.modules:  # all have trained already: only lost members are missing
                machine.waits = MODULE_WAITS
            # A resumed job may have another number of groups: all count from its start again.
            known = [] if fresh else mine
            done = [v.round + 1 for _, v in known if v is not None and v.committed]
            machine.committed_round = max(done, default=job.start_round)
        runtime = RoundRuntime(machine, now, SaveSchedule(job.spec.saves_every_s, now=now))
        runtime.grouped = groups > 0
        runtime.verdicts = {plan.epoch: verdict for plan, verdict in mine if verdict is not None}
        runtime.decided.set()
        if not groups:
            _enrol(machine, job, fresh=fresh)
        if fresh and job.leases:
            machine.commit_log.data_slots.renew(machine.members.states)
        if not fresh:
            _recall(machine, mine)
            await _reopen(runtime, mine, store, now)
        runtimes.append(runtime)
    return runtimes


def _machine(job: Job, rows: Rows, *, fresh: bool, first_grace_s: float) -> RoundMachine:
    return RoundMachine(
        job.job,
        nodes_wanted=job.nodes_wanted - len(job.aside),
        min_nodes=max(0, job.min_nodes - len(job.aside)),
        aside=job.aside,
        quorum=job.spec.job.quorum,
        preference=job.spec.job.route,
        collective="" if job.spec.strategy.collective == "auto" else job.spec.strategy.collective,
        committed_round=job.committed_round,
        start_round=job.start_round,
        epoch=rows[0][0].epoch if rows else 0,
        first_grace_s=first_grace_s,
        starting=fresh or not rows,
        unproved=not fresh,
        stopping=job.stopping,
        verified=job.spec.job.trust == "audit",
        paused=job.paused,
        commit_log=CommitLog(
            job.measures,
            DataSlots(job.slots, dict(job.leases)),
            paced=job.spec.train.pace == "measured",
            every=0 if fresh else _last_interval(rows),
        ),
    )


def _last_interval(rows: Rows) -> int:
    """Return the interval that members received last; 0: that of the job file."""
    return next((v.every for _, v in rows if v is not None and v.committed), 0)


def _enrol(machine: RoundMachine, job: Job, *, fresh: bool) -> None:
    for member in job.members.values():
        name, members = member.member, machine.members
        if name in machine.aside:
            continue
        machine.dials[name] = member.dial
        if member.live:
            machine.expect(name)
            if member.leaving:
                members.leaving.add(name)
            if member.incarnation and not fresh:
                members.states[name] = RoundMemberState.LIVE
        elif member.state == MemberState.LOST and not fresh:
            members.states[name] = RoundMemberState.GONE  # may still reconnect
        if job.outsiders.get(name) == member.attempt and not fresh:
            members.outsiders.add(name)


def _recall(machine: RoundMachine, rows: Rows) -> None:
    """Restore which members hold the committed state, and their data slots.

    Without a verdict on it (the state was adopted, or the run set back) any member may hold it.
    """
    committed = [(plan, v) for plan, v in rows if v is not None and v.committed]
    if committed and committed[0][1].round + 1 == machine.committed_round:
        plan, verdict = committed[0]
        machine.members.recorded = set(plan.members) & set(verdict.contributors)
        held = {m: lease.slot for m, lease in verdict.leases.items()}
        machine.commit_log.data_slots.hold_only(held)
    else:
        there = {
            m
            for m, s in machine.members.states.items()
            if s in (RoundMemberState.LIVE, RoundMemberState.GONE)
        }
        machine.members.recorded = there - machine.members.outsiders


async def _reopen(runtime: RoundRuntime, rows: Rows, store: RoundStore, now: float) -> None:
    if not rows or rows[0][1] is not None:
        return
    machine, plan = runtime.machine, rows[0][0]
    # committed in the record, but the verdict was neither stored nor sent
    if plan.round < machine.committed_round:
        machine.committed_round = plan.round
        cursors = await store.cursors_at(machine.job, plan.round)
        await store.set_round(machine.job, plan.round, cursors)
        machine.commit_log.set_back(cursors)
    joins = await store.joins_of(plan)
    machine.reopen(plan, now, joins)
    runtime.closing = max((join.closing for join in joins.values()), default=0)
    runtime.decided.clear()
