"""Effects of a commit besides the round count: data leases, pace, time limits and the route.

The pace is each member's share of the steps in a period, chosen so that all finish together. It
follows measured speed (DyLU, Liu et al. 2024, arXiv:2401.09135), with a minimum of a quarter. All
members within a dead band of the fastest, which is measurement noise, do all steps; the others do
as many as they can until the slowest of those is done.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from atoll.ids import slot_of
from atoll.rounds import faster_route
from atoll.rounds import timing as patience
from atoll.rounds.attempt import Attempt
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import EventRaised
from atoll.rounds.timing import RoundTimings, mean
from atoll.wire.messages import Lease, RoundJoin, Verdict

STEP_EMA = 0.5
SLOWEST = 0.25
"""Smallest share of a period's steps."""
MOST = 4.0
"""Largest share, of a guest."""
DEAD_BAND = 0.1
"""Relative speed differences below this are treated as noise. With 0.2 the fastest of a mixed fleet
waited for the slowest of the band: 2 % of all members' time (`python -m bench.simulate`)."""
GRAIN = 256
"""Shares are multiples of one over this; with 32 the rounding cost 1 % of all members' time."""
SHORTEST_STEP_S, LONGEST_STEP_S = 1e-6, 1e6
"""Bounds of a reported step time: the reciprocal of a smaller one would be infinite."""
SURE_REPORTS, SURE_S = 5, 5.0
"""Reports, and seconds of work, after which a member's speed is considered known."""
LEAST_LEFT = 0.1
"""A newcomer trains nothing in a period of which less than this share is left."""


def learn_steps(timings: RoundTimings, joins: Mapping[str, RoundJoin]) -> None:
    """Update the moving averages of the members' speeds."""
    for member, join in joins.items():
        if join.steps > 0 and join.busy_s > 0:
            new = min(LONGEST_STEP_S, max(SHORTEST_STEP_S, join.busy_s / join.steps))
            old = timings.step_s.get(member)
            timings.step_s[member] = mean(old, new, weight=STEP_EMA)
            timings.reports[member] = timings.reports.get(member, 0) + 1
            timings.busy_s[member] = timings.busy_s.get(member, 0.0) + join.busy_s


def base_step_s(step_s: Iterable[float]) -> float:
    """Return the seconds of a step that make a period: the slowest in the dead band; 0: none."""
    known = [seconds for seconds in step_s if seconds > 0]
    fastest = min(known, default=0.0)
    return max((s for s in known if fastest >= s * (1.0 - DEAD_BAND)), default=0.0)


def share_of(own_s: float, base_s: float) -> float:
    """Return the share of a period's steps for a member that needs `own_s` for one step.

    `base_s`: see `base_step_s`.
    """
    if not own_s > 0 or not base_s > 0:
        return 1.0
    return min(1.0, max(SLOWEST, round(base_s / own_s * GRAIN) / GRAIN))


def guest_share(own_s: float, others_s: float) -> float:
    """Return the share of a period's steps that a guest does while the others do all of them."""
    if not own_s > 0 or not others_s > 0 or abs(others_s / own_s - 1.0) <= DEAD_BAND:
        return 1.0
    return min(MOST, max(SLOWEST, round(others_s / own_s * GRAIN) / GRAIN))


def assign_steps(
    step_s: Mapping[str, float], members: Iterable[str], *, guests: Container[str] = ()
) -> dict[str, float]:
    """Return the share of every member that does more or fewer steps than a whole period.

    With `guests` the others do all steps together, at the pace of the slowest; a guest does as many
    as it can in that time, up to `MOST` times as many.
    """
    known = {member: step_s[member] for member in members if member in step_s}
    hosts = [seconds for member, seconds in known.items() if member not in guests]
    if len(hosts) < len(known):
        found = {m: guest_share(s, max(hosts, default=s)) for m, s in known.items() if m in guests}
        return {member: share for member, share in found.items() if share != 1.0}
    base_s = base_step_s(known.values())
    shares = {member: share_of(own, base_s) for member, own in known.items()}
    return {member: share for member, share in shares.items() if share < 1.0}


def too_slow(timings: RoundTimings, members: Iterable[str]) -> dict[str, float]:
    """Return members too slow for the smallest share, with their slowdown relative to the fastest.

    Members with too few measurements are skipped, because the times of single steps are noisy.
    """
    known = {
        m: timings.step_s[m]
        for m in members
        if timings.reports.get(m, 0) >= SURE_REPORTS and timings.busy_s.get(m, 0.0) >= SURE_S
    }
    fastest = min(known.values(), default=0.0)
    return {m: own / fastest for m, own in known.items() if fastest and own * SLOWEST > fastest}


def newcomer_pace(own_share: float, *, period_s: float | None, elapsed_s: float) -> float:
    """Return the share of steps for a member that starts in the middle of a period.

    It is 0 if no period has been measured (`period_s` is None), so that the others do not wait.
    """
    left = 0.0 if not period_s else 1.0 - elapsed_s / period_s
    return own_share * min(1.0, left) if left >= LEAST_LEFT else 0.0


RELAY = "relay"
FAST_ROUTES = frozenset({"direct", "hierarchical"})
"""Routes with direct connections; replaced by the relay for some rounds after they fail."""

MAX_RELAY_ROUNDS = 64
"""Most rounds for which a failed route is avoided; doubled with each failure up to this."""

MAX_PATIENCE = 64.0
"""Time limits grow at most by this factor after aborts: two hours for a route never measured. A
dead member is noticed long before, by its silence; a slow line may need them."""


@dataclass
class CommitLog:
    """Timings, data leases and route history of one job."""

    timings: RoundTimings = field(default_factory=RoundTimings)
    data_slots: DataSlots = field(default_factory=lambda: DataSlots(0))
    paced: bool = True
    """Whether slower members do fewer steps."""
    every: int = 0
    """Steps between two rounds as planned while the job runs; 0: as its file says."""
    codec: str = ""
    """What a codec `auto` takes with the next verdict, as planned while the job runs."""
    committed_at: float | None = None
    """Start of the current period; None: unknown."""
    patience: float = 1.0
    _base_s: float = 0.0
    """See `base_step_s`, of the members of this period; 0: not known."""
    _relay_rounds: int = 0
    _relay_until: int = 0
    _reported_slow: set[str] = field(default_factory=set)

    def commit(
        self,
        attempt: Attempt,
        verdict: Verdict,
        trainers: list[str],
        now: float,
        *,
        guests: Container[str] = (),
    ) -> tuple[Verdict, list[EventRaised]]:
        """Record a committed attempt; return the verdict with leases and pace, and notices.

        `trainers` are the members that train in the next period, with `guests` among them.
        """
        timings, route = self.timings, attempt.plan.route
        seconds, known = now - attempt.planned_at, timings.duration_s.get(route)
        timings.duration_s[route] = patience.mean(known, seconds)
        if self.committed_at is not None:
            timings.period_s = patience.mean(timings.period_s, now - self.committed_at)
        self.committed_at, self.patience = now, 1.0
        if route in FAST_ROUTES:
            self._relay_rounds = 0
        learn_steps(timings, attempt.joins)
        if any(join.steps for join in attempt.joins.values()):  # not the exchange of the start
            patience.learn_round(timings, seconds + _way_in_s(attempt))
        self._base_s = base_step_s(timings.step_s[m] for m in trainers if m in timings.step_s)
        reached = _reached(attempt, verdict)
        notes = self._take_cursors(reached)
        decided = Verdict(
            verdict.round,
            verdict.epoch,
            True,
            verdict.digest,
            verdict.contributors,
            leases=self.data_slots.renew(trainers) if reached else {},
            pace=assign_steps(timings.step_s, trainers, guests=guests) if self.paced else {},
            delay=patience.hiding_steps(timings, step_s=_step_s(timings, trainers)),
            every=self.every,
            codec=self.codec,
            group=verdict.group,
        )
        self.codec = ""
        return decided, notes + self._note_route(attempt, seconds) + self._note_slow(trainers)

    def abort(self, attempt: Attempt) -> None:
        """Double the time limits and avoid the route if no lost member explains the abort."""
        if attempt.left:
            return
        self.patience = min(MAX_PATIENCE, 2 * self.patience)
        plan, known = attempt.plan, self.timings.faster_route
        faster_route.failed(known, relay=plan.route == RELAY, round_=plan.round)
        if plan.route in FAST_ROUTES:
            self._relay_rounds = min(MAX_RELAY_ROUNDS, max(2, 2 * self._relay_rounds))
            self._relay_until = attempt.plan.round + self._relay_rounds

    def relay_only(self, round_: int) -> bool:
        """Return whether a faster route failed recently."""
        return round_ < self._relay_until

    def timeout_s(self, route: str) -> float:
        """Return the time limit of a reduce."""
        return patience.timeout_s(self.timings, route, patience=self.patience)

    def newcomer_pace(
        self, member: str, trainers: Callable[[], list[str]], *, now: float, whole: bool
    ) -> float:
        """Return the share of a period's steps for a member that starts now.

        `whole` means that the period starts with it. `trainers` is called only if no round has been
        committed since the start: with thousands of members a newcomer must not scan all of them.
        """
        own, share = self.timings.step_s.get(member), 1.0
        if self.paced and own is not None:
            if not self._base_s:
                known = [self.timings.step_s[m] for m in trainers() if m in self.timings.step_s]
                self._base_s = base_step_s(known)
            share = share_of(own, self._base_s or own)
        if whole:
            return share
        if self.committed_at is None:
            return 0.0
        elapsed_s = now - self.committed_at
        return newcomer_pace(share, period_s=self.timings.period_s, elapsed_s=elapsed_s)

    def set_back(self, cursors: Mapping[int, dict[str, int]]) -> None:
        """Continue from an earlier round."""
        self.committed_at, self._relay_until = None, 0
        self.data_slots.set_back(cursors)

    def _take_cursors(self, reached: Mapping[str, Lease]) -> list[EventRaised]:
        """Advance the cursors of the contributors; data that only others read is leased again."""
        notes: list[EventRaised] = []
        for member in sorted(reached, key=lambda m: (reached[m].slot != slot_of(m), slot_of(m))):
            wrong = self.data_slots.wrong(member, reached[member])
            if wrong:
                text = f"the data position of {member} is refused: {wrong}"
                notes.append(EventRaised("refused", text, member))
            else:
                self.data_slots.take_over(member, reached[member])
        return notes

    def _note_route(self, attempt: Attempt, seconds: float) -> list[EventRaised]:
        """Report it if the other route turns out to be the faster one."""
        plan, known = attempt.plan, self.timings.faster_route
        if plan.route not in (*FAST_ROUTES, RELAY):
            return []
        nbytes = statistics.median_low([vote.nbytes for vote in attempt.votes.values()] or [0])
        text = faster_route.learn(
            known, relay=plan.route == RELAY, seconds=seconds, nbytes=nbytes, round_=plan.round
        )
        return [EventRaised("route", text)] if text else []

    def _note_slow(self, trainers: list[str]) -> list[EventRaised]:
        """Report, once, members too slow to finish with the others at any pace."""
        slow = too_slow(self.timings, trainers)
        fresh = {m: ratio for m, ratio in slow.items() if m not in self._reported_slow}
        self._reported_slow |= fresh.keys()
        return [
            EventRaised("too-slow", f"{m} needs {r:.1f} times as long for a step as the fastest", m)
            for m, r in fresh.items()
        ]


def _step_s(timings: RoundTimings, trainers: Iterable[str]) -> float:
    """Return the seconds of a step of the schedule: those of the fastest member; 0: unknown."""
    return min((timings.step_s[m] for m in trainers if m in timings.step_s), default=0.0)


def _way_in_s(attempt: Attempt) -> float:
    """Return how long the last member to join had waited for its plan, the round before.

    Others also waited for that member, which no delay can hide.
    """
    stats = [join.stats for join in attempt.joins.values() if join.stats is not None]
    return min((one.phases.get("wait", 0.0) for one in stats), default=0.0)


def _reached(attempt: Attempt, verdict: Verdict) -> dict[str, Lease]:
    """Return the position of each contributor in its data.

    A contribution in the mean also counts if its member was lost before it voted.
    """
    leases = {m: join.lease for m, join in attempt.joins.items()}
    leases |= {m: vote.lease for m, vote in attempt.votes.items() if vote.ok and vote.lease}
    contributors = frozenset(verdict.contributors)
    return {m: lease for m, lease in leases.items() if lease and m in contributors}
