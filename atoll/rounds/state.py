"""The state of one job's rounds: its members, their waiting joins, and the open attempt."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.ids import slot_of
from atoll.rounds import timing as patience
from atoll.rounds.attempt import Attempt
from atoll.rounds.checks import is_behind
from atoll.rounds.commit import CommitLog
from atoll.rounds.effects import Effect, EventRaised, Refused
from atoll.rounds.member_states import AWAITED, MemberStates
from atoll.rounds.ring_order import MeasuredLines
from atoll.rounds.timing import FixedWaits, RoundTimings, learn_spread
from atoll.wire.messages import RoundJoin, RoundPlan
from atoll.wire.states import RoundMemberState


@dataclass
class PendingJoins:
    """Joins of the members that wait for the next plan."""

    joins: dict[str, RoundJoin] = field(default_factory=dict)
    not_before: float = 0.0
    """Waiting time before this moment does not count: the run was paused, or only guests waited."""
    late: set[str] = field(default_factory=set)
    """Members that the last plan left out because they did not join in time."""
    highest: int = -1
    """The highest round that a join of these named."""
    enough_at: float | None = None
    """Since when there are joins for a quorum."""
    _came: dict[str, float] = field(default_factory=dict)
    """When each member joined, in this order."""
    _last: tuple[int, float] = (-1, 0.0)
    """The round of the last plan, and when its first member joined."""

    def enter(self, member: str, join: RoundJoin, now: float) -> None:
        """Add a join; a repeated one replaces the first and keeps its time."""
        self.joins[member] = join
        self.highest = max(self.highest, join.round)
        self._came.setdefault(member, now)

    def leave(self, member: str) -> None:
        """Remove a join."""
        self.joins.pop(member, None)
        self._came.pop(member, None)

    def members(self) -> list[str]:
        """Return the waiting members, in slot order."""
        return sorted(self.joins, key=slot_of)

    def since(self) -> float:
        """Return when the waiting members began to wait for the others."""
        return max(next(iter(self._came.values())), self.not_before)

    def spread_s(self, *, starting: bool) -> float:
        """Return the seconds between the first and the last join.

        Processes of a starting job start at different times, which does not predict later rounds;
        then the spread of busy times counts, if all members have reported one.
        """
        times = [max(came, self.not_before) for came in self._came.values()]
        busy = [join.busy_s for join in self.joins.values()]
        if starting and all(busy):
            times = busy
        return max(times) - min(times)

    def leave_for(self, round_: int) -> dict[str, RoundJoin]:
        """Remove and return all joins: their members have the plan of this round."""
        self._last = (round_, self.since())
        joins, self.joins, self._came = self.joins, {}, {}
        self.highest, self.enough_at = -1, None
        return joins

    def learn_late(self, member: str, round_: int, now: float, timings: RoundTimings) -> None:
        """Extend the grace period by a late member's delay.

        Otherwise two members that are alternately a little late would never join the same round.
        """
        if member in self.late and round_ == self._last[0]:
            learn_spread(timings, now - self._last[1])
        self.late.discard(member)


@dataclass
class JobRounds:
    """The rounds of one job. Times are monotonic seconds passed as `now`."""

    job: str
    nodes_wanted: int
    min_nodes: int = 0
    """With fewer members the run pauses; 0: one is enough."""
    group: int = 0
    groups: int = 1
    """Groups of this job that meet in rounds of their own; each has every `groups`-th epoch."""
    quorum: float = 0.0
    """Share of the members whose joins suffice for a plan; 0: it waits for all."""
    collective: str = ""
    """Of the direct route, as the job's file says or planned while it runs; empty: members know."""
    whole: bool = False
    """A round commits only with the contribution of every member of its plan."""
    required: frozenset[str] = frozenset()
    """Members without which no round is planned."""
    guests: frozenset[str] = frozenset()
    """Members that meet in several groups. They never meet without another member; their pace
    follows that of the others, and if states differ, that of the others counts."""
    aside: frozenset[str] = frozenset()
    """Members of the job that take no part in rounds."""
    preference: str = "auto"
    """`auto`, `direct` or `relay`."""
    committed_round: int = 0
    """Rounds committed so far, which is the number of the next one."""
    start_round: int = 0
    """`committed_round` when the job was started or resumed."""
    epoch: int = 0
    """The last epoch assigned, by any hub process."""
    first_grace_s: float = 120.0
    """Seconds that the first round waits for members that are still starting."""
    starting: bool = True
    """No round was planned since the job started: wait for every wanted member."""
    unproved: bool = False
    """The record comes from a previous hub process and no member has confirmed it yet."""
    stopping: bool = False
    verified: bool = False
    """Whether members' work is computed again by others; see `verification`."""
    unweighted: frozenset[str] = frozenset()
    """Members whose contributions have no weight, see `RoundPlan`."""
    saving: bool = False
    """The next plan asks the members to save the state."""
    reducer_ready: bool = False
    paused: str = ""
    """Why no round is planned; empty: not paused."""
    waits: FixedWaits | None = None
    """None: waits are derived from measured times."""
    commit_log: CommitLog = field(default_factory=CommitLog)
    members: MemberStates = field(default_factory=MemberStates)
    dials: dict[str, list[str]] = field(default_factory=dict)
    lines: MeasuredLines = field(default_factory=MeasuredLines)
    attempt: Attempt | None = None
    pending: PendingJoins = field(default_factory=PendingJoins)
    aborted: Attempt | None = None
    """The last attempt of this round, if it was aborted."""
    empty_at: float | None = None
    """When the last member left, if none is there."""
    voted_against: set[str] = field(default_factory=set)
    """Members that voted against the last attempt of this round."""

    # ------------------------------------------------------------------------- queries

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the open attempt."""
        return self.attempt.plan if self.attempt is not None else None

    @property
    def joins(self) -> dict[str, RoundJoin]:
        """Joins of the members that wait for the next plan."""
        return self.pending.joins

    @property
    def recovers(self) -> bool:
        """Whether a newcomer recovers the committed state instead of starting afresh."""
        return self.committed_round > self.start_round

    @property
    def first_epoch(self) -> int:
        """Epoch of the job's first plan while that can be foreseen; else 0."""
        return self.epoch + 1 if self.starting and self.groups == 1 else 0

    def attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        return self.attempt is not None and self.attempt.attends(member)

    def grace_s(self) -> float:
        """Return the seconds for which joins are awaited after the first one."""
        if self.waits is not None:
            return self.waits.grace_s
        return patience.grace_s(self.commit_log.timings, first_s=self.first_grace_s)

    def hold_s(self) -> float:
        """Return the seconds for which a round waits for a recovering member."""
        return self.waits.hold_s if self.waits else patience.hold_s(self.commit_log.timings)

    def timeout_s(self, route: str) -> float:
        """Return the time limit of a reduce."""
        return self.waits.timeout_s if self.waits else self.commit_log.timeout_s(route)

    def awaited_until(self) -> dict[str, float]:
        """Return the deadline of every member that the next plan waits for.

        Recovering members, and those that have just recovered, have their own deadlines.
        """
        waited_for = [*self.members.awaited(), *self.members.recovering(self.committed_round)]
        found = {member: self.deadline_of(member) for member in waited_for}
        return {member: deadline for member, deadline in found.items() if deadline is not None}

    def deadline_of(self, member: str) -> float | None:
        """Return until when the next plan waits for a member; None: not at all."""
        if member in self.joins:
            return None
        state, since, hold_s = self.members.states.get(member), self.pending.since(), self.hold_s()
        if state in AWAITED:
            ready_at = self.members.ready_at.get(member, 0.0)
            if member not in self.members.waited_for:
                ready_at = min(ready_at, since + hold_s)
            return max(since + self.grace_s(), ready_at)
        if self.members.is_recovering(member, self.committed_round):
            asked_at = self.members.asked_at.get(member, since)
            hold_s = self.members.holds.get(member, hold_s)
            return min(asked_at + hold_s, since + 1.5 * hold_s)
        return None

    def waits_for(self) -> list[str]:
        """Return the members, known before, that currently block progress."""
        if self.attempt is not None:
            return self.attempt.missing()
        if not self.joins:
            return []
        return [
            m for m in self.awaited_until() if self.members.states[m] != RoundMemberState.EXPECTED
        ]

    # ------------------------------------------------------------------ single members

    def refuse(self, member: str) -> list[Effect]:
        """Refuse a join of another round than the next one."""
        error = is_behind(self.joins[member].round, self.committed_round)
        return [Refused(member, error), *self.step_aside(member, RoundMemberState.AWAY)]

    def leave_out(self, member: str, why: str) -> list[Effect]:
        """Continue without a member, and raise an event."""
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return [
            *self.step_aside(member, RoundMemberState.AWAY),
            EventRaised("member-left-out", text, member),
        ]

    def step_aside(
        self, member: str, state: RoundMemberState, *, tell_members: bool = True
    ) -> list[Effect]:
        """Stop waiting for a member; return the notice for an open attempt."""
        self.members.states[member] = state
        self.pending.leave(member)
        if self.attempt is None:
            return []
        return list(self.attempt.leave(member, tell_members=tell_members))

    def proved(self, member: str, base: str) -> None:
        """Record that a member holds the committed state."""
        self.members.proved(member, base)
        self.unproved = False
