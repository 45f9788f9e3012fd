"""State of the rounds of one job: its members, their waiting joins, and the open attempt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from atoll.ids import slot_of
from atoll.rounds import timing as patience
from atoll.rounds.attempt import Attempt
from atoll.rounds.checks import is_behind
from atoll.rounds.commit import CommitLog
from atoll.rounds.effects import Effect, EventRaised, Refused
from atoll.rounds.timing import FixedWaits, RoundTimings, learn_spread
from atoll.wire.messages import RoundJoin, RoundPlan


@dataclass
class PendingJoins:
    """Members that wait for the next plan, and since when."""

    joins: dict[str, RoundJoin] = field(default_factory=dict)
    not_before: float = 0.0
    """Waiting does not count before this time: the run was paused."""
    late: set[str] = field(default_factory=set)
    """Members that the last plan was made without because they did not come in time."""
    _came: dict[str, float] = field(default_factory=dict)
    _last: tuple[int, float] = (-1, 0.0)
    """The round of the last plan, and since when its members waited."""

    def enter(self, member: str, join: RoundJoin, now: float) -> None:
        """Add a join; a second one of a member replaces the first, and keeps its time."""
        self.joins[member] = join
        self._came.setdefault(member, now)

    def leave(self, member: str) -> None:
        """Remove a join."""
        self.joins.pop(member, None)
        self._came.pop(member, None)

    def members(self) -> list[str]:
        """Return the waiting members, in slot order."""
        return sorted(self.joins, key=slot_of)

    def since(self) -> float:
        """Return since when the waiting members wait for the others."""
        return max(min(self._came.values()), self.not_before)

    def spread_s(self, *, starting: bool) -> float:
        """Return how far apart the members came.

        Processes of a job that starts begin at different times, which says nothing of later
        rounds; there the time that each was busy counts, if all have reported it.
        """
        times = [max(came, self.not_before) for came in self._came.values()]
        busy = [join.busy_s for join in self.joins.values()]
        if starting and all(busy):
            times = busy
        return max(times) - min(times)

    def leave_for(self, round_: int) -> dict[str, RoundJoin]:
        """Return all joins, and remove them: their members have the plan of this round."""
        self._last = (round_, self.since())
        joins, self.joins, self._came = self.joins, {}, {}
        return joins

    def learn_late(self, member: str, round_: int, now: float, timings: RoundTimings) -> None:
        """Learn from a late member how long to wait the next time.

        Otherwise two members that are a little late in turns would never meet again.
        """
        if member in self.late and round_ == self._last[0]:
            learn_spread(timings, now - self._last[1])
        self.late.discard(member)


class RoundMemberState(StrEnum):
    """What a member of a job does just now, as far as rounds are concerned."""

    EXPECTED = "expected"
    """Its process starts with the job; rounds wait for it."""
    LAUNCHED = "launched"
    """A newcomer that has not asked for the committed state yet; no round waits for it."""
    RECOVERING = "recovering"
    """It takes over the committed state; rounds wait for a bounded time."""
    LIVE = "live"
    """It trains, or waits in a join."""
    AWAY = "away"
    """Its process is there, but was silent, late or fell behind: no round waits for it."""
    GONE = "gone"
    """Its process has ended, or it is leaving."""


AWAITED = frozenset({RoundMemberState.EXPECTED, RoundMemberState.LIVE})
OUTSIDE = frozenset({RoundMemberState.LIVE, RoundMemberState.AWAY, RoundMemberState.GONE})
"""States of members that keep their own history when the run is set back."""

MOST_SKIPPED = 6
"""A member that never recovers in time is awaited in one of 2**6 rounds at least."""


@dataclass
class MemberStates:
    """The members of one job."""

    states: dict[str, RoundMemberState] = field(default_factory=dict)
    up_to_date: set[str] = field(default_factory=set)
    """Members known to stand on the committed state."""
    recorded: set[str] = field(default_factory=set)
    """Members that stand on it by the record of an earlier life of the hub, not confirmed yet."""
    bases: dict[str, str] = field(default_factory=dict)
    """Digests of the committed state that members have reported."""
    leaving: set[str] = field(default_factory=set)
    """Members that leave for good."""
    outsiders: set[str] = field(default_factory=set)
    """Members whose processes are from before the run was set back, and not heard of since."""
    asked_at: dict[str, float] = field(default_factory=dict)
    """When each member last asked who has the state."""
    ready_at: dict[str, float] = field(default_factory=dict)
    """Until when the first join of a member that has just taken over the state may take."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the work that a member does before its first join."""
    finished: bool = False
    """A member has done all its work: the job is about to end."""
    _slow: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How often a member did not recover in time, and up to which round nobody waits for it."""

    def begin(self, member: str, state: RoundMemberState) -> None:
        """Note a new process of a member."""
        self.forget(member)
        self.leaving.discard(member)
        self.outsiders.discard(member)
        self.states[member] = state

    def knows(self, member: str) -> bool:
        """Return whether a member stands on the committed state, proved or by the record."""
        return member in self.up_to_date or member in self.recorded

    def proved(self, member: str, base: str) -> None:
        """Note that a member has shown that it holds the committed state."""
        self.up_to_date.add(member)
        self.bases[member] = base
        self.states[member] = RoundMemberState.LIVE

    def forget(self, member: str) -> None:
        """A member stands on nothing that others could take over."""
        self.up_to_date.discard(member)
        self.recorded.discard(member)
        self.bases.pop(member, None)

    def committed(self, members: Iterable[str]) -> None:
        """A round was committed; these members have its state."""
        self.up_to_date, self.recorded, self.bases = set(members), set(), {}
        self.ready_at = {}

    def awaited(self) -> list[str]:
        """Return the members that every round waits for."""
        return [m for m, s in self.states.items() if s in AWAITED]

    def recovering(self, round_: int) -> list[str]:
        """Return the members that a round waits for while they take over the state."""
        return [
            m
            for m, s in self.states.items()
            if s == RoundMemberState.RECOVERING and round_ >= self._slow.get(m, (0, 0))[1]
        ]

    def trainers(self) -> list[str]:
        """Return the members that train in the next period, in slot order."""
        found = [
            m
            for m, s in self.states.items()
            if s in (RoundMemberState.LIVE, RoundMemberState.RECOVERING)
        ]
        return sorted(found, key=slot_of)

    def all_gone(self) -> bool:
        """Return whether no member is left, though the work is not done."""
        everybody_gone = all(s == RoundMemberState.GONE for s in self.states.values())
        return bool(self.states) and everybody_gone and not self.finished

    def too_slow(self, member: str, round_: int) -> None:
        """A member did not recover in time: twice as many rounds as before go on without it."""
        times = self._slow.get(member, (0, 0))[0] + 1
        self._slow[member] = (times, round_ + 2 ** min(times, MOST_SKIPPED))

    def recovered(self, member: str, ready_at: float) -> None:
        """A member did recover, and joins at the latest at `ready_at`."""
        self._slow.pop(member, None)
        self.outsiders.discard(member)
        self.ready_at[member] = ready_at

    def holders(self, asker: str, failed: Iterable[str]) -> list[str]:
        """Return the donors of the committed state, in slot order.

        Members that answer now come before those that were silent or late, those that failed the
        asker come last.
        """
        there = [m for m, s in self.states.items() if s != RoundMemberState.GONE and self.knows(m)]
        others = [m for m in there if m != asker]
        near = [m for m in others if self.states[m] != RoundMemberState.AWAY]
        for choice in (near, others):
            usable = [m for m in choice if m not in set(failed)]
            if usable:
                return sorted(usable, key=slot_of)
        return sorted(others, key=slot_of)

    def missed(self) -> list[str]:
        """Return the members that had the committed state when they were lost."""
        return [m for m, s in self.states.items() if s == RoundMemberState.GONE and self.knows(m)]

    def set_back(self) -> None:
        """Forget who holds the committed state: no member does any more.

        A member that returns from before has another history than those that go on now.
        """
        self.outsiders = {m for m, s in self.states.items() if s in OUTSIDE}
        self.committed(())
        self._slow = {}


def present(members: MemberStates, joins: Mapping[str, object]) -> set[str]:
    """Return the members that are at work or wait for the next round."""
    return set(members.awaited()) | set(joins)


@dataclass
class JobState:
    """The rounds of one job. Times are monotonic seconds handed in as `now`."""

    job: str
    nodes_wanted: int
    min_nodes: int = 0
    """With fewer members the run pauses; 0: one is enough."""
    aside: frozenset[str] = frozenset()
    """Members of the job that take no part in rounds, and that no round waits for."""
    preference: str = "auto"
    """`auto`, `direct` or `relay`."""
    committed_round: int = 0
    """Rounds committed so far: the next one to join."""
    start_round: int = 0
    """What `committed_round` was when the job was started or resumed."""
    epoch: int = 0
    """The last epoch given out, in any life of the hub."""
    first_grace_s: float = 120.0
    """How long the first round waits for members that are still starting."""
    starting: bool = True
    """No round was planned since the job started: wait for every member that is wanted."""
    unproved: bool = False
    """The record comes from an earlier life of the hub, and no member has confirmed it yet."""
    stopping: bool = False
    reducer_ready: bool = False
    paused: str = ""
    """Why no round is planned, if so."""
    waits: FixedWaits | None = None
    """None: waits follow from the times that were measured."""
    commit_log: CommitLog = field(default_factory=CommitLog)
    members: MemberStates = field(default_factory=MemberStates)
    dials: dict[str, list[str]] = field(default_factory=dict)
    attempt: Attempt | None = None
    """The attempt that awaits its verdict."""
    pending: PendingJoins = field(default_factory=PendingJoins)
    """Members that wait for the next plan."""
    aborted: Attempt | None = None
    """The last attempt of this round, if it was aborted."""
    empty_at: float | None = None
    """Since when no member is there."""
    voted_against: set[str] = field(default_factory=set)
    """Who voted against the last attempt of this round."""

    # ----------------------------------------------------------------------- questions

    @property
    def plan(self) -> RoundPlan | None:
        """The plan of the attempt that awaits its verdict."""
        return self.attempt.plan if self.attempt is not None else None

    @property
    def joins(self) -> dict[str, RoundJoin]:
        """Joins of the members that wait for the next plan."""
        return self.pending.joins

    @property
    def recovers(self) -> bool:
        """Whether a newcomer takes over the committed state instead of starting afresh."""
        return self.committed_round > self.start_round

    def attends(self, member: str) -> bool:
        """Return whether a member is in the open plan and still counts."""
        return self.attempt is not None and self.attempt.attends(member)

    def grace_s(self) -> float:
        """Return how long joins are waited for after the first one came."""
        if self.waits is not None:
            return self.waits.grace_s
        return patience.grace_s(self.commit_log.timings, first_s=self.first_grace_s)

    def hold_s(self) -> float:
        """Return how long a round waits for a member that takes over the state."""
        return self.waits.hold_s if self.waits else patience.hold_s(self.commit_log.timings)

    def timeout_s(self, route: str) -> float:
        """Return how long a reduce on a route may take."""
        return self.waits.timeout_s if self.waits else self.commit_log.timeout_s(route)

    def awaited_until(self) -> dict[str, float]:
        """Return, for every member that the next plan waits for, until when.

        Joins of others must have come. A member that takes over the state, or has just done so,
        has a time of its own.
        """
        since, hold_s = self.pending.since(), self.hold_s()
        until: dict[str, float] = {}
        for member in self.members.awaited():
            ready_at = min(self.members.ready_at.get(member, 0.0), since + hold_s)
            until[member] = max(since + self.grace_s(), ready_at)
        for member in self.members.recovering(self.committed_round):
            asked_at = self.members.asked_at.get(member, since)
            until[member] = min(asked_at + hold_s, since + 1.5 * hold_s)
        return {m: deadline for m, deadline in until.items() if m not in self.joins}

    def waits_for(self) -> list[str]:
        """Return the members that have spoken before and without which nothing goes on just now."""
        if self.attempt is not None:
            return self.attempt.missing()
        if not self.joins:
            return []
        return [
            m for m in self.awaited_until() if self.members.states[m] != RoundMemberState.EXPECTED
        ]

    # ------------------------------------------------------------------ single members

    def refuse(self, member: str) -> list[Effect]:
        """Refuse the join of a member that waits for another round than the next one."""
        error = is_behind(self.joins[member].round, self.committed_round)
        return [Refused(member, error), *self.step_aside(member, RoundMemberState.AWAY)]

    def leave_out(self, member: str, why: str) -> list[Effect]:
        """Go on without a member, and say so."""
        text = f"{member} is left out of round {self.committed_round}: {why}"
        return [
            *self.step_aside(member, RoundMemberState.AWAY),
            EventRaised("member-left-out", text, member),
        ]

    def step_aside(
        self, member: str, state: RoundMemberState, *, tell_members: bool = True
    ) -> list[Effect]:
        """Stop waiting for a member; in an open attempt the reducer and the others are notified."""
        self.members.states[member] = state
        self.pending.leave(member)
        if self.attempt is None:
            return []
        return list(self.attempt.leave(member, tell_members=tell_members))

    def proved(self, member: str, base: str) -> None:
        """Note that a member has shown that it holds the committed state."""
        self.members.proved(member, base)
        self.unproved = False
