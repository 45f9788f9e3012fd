"""What a verdict changes beside the count of rounds: leases, pace, patience, and the route.

How many steps each member does in a period, so that all arrive together.

The number of steps follows the measured speed (DyLU, Liu et al. 2024, arXiv:2401.09135), here as a
share of the fastest member's, clamped to a quarter and with a dead band, so that noise of a
measurement changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.ids import slot_of
from atoll.rounds import timing as patience
from atoll.rounds.attempt import Attempt
from atoll.rounds.data_slots import DataSlots
from atoll.rounds.effects import EventRaised
from atoll.rounds.timing import RoundTimings, mean
from atoll.wire.messages import Lease, RoundJoin, Verdict

STEP_EMA = 0.5
SLOWEST = 0.25
"""Least share of a period's steps."""
DEAD_BAND = 0.2
"""Differences below this share are taken for noise."""
GRAIN = 32
"""Shares are multiples of one over this."""
SURE_REPORTS, SURE_S = 5, 5.0
"""Reports, and seconds of work, after which a member's speed is taken for known."""
LEAST_LEFT = 0.1
"""A newcomer does nothing in a period of which less than this share is left."""


def learn_steps(measures: RoundTimings, joins: Mapping[str, RoundJoin]) -> None:
    """Take the speed of every member that told it into the running means."""
    for member, join in joins.items():
        if join.steps > 0 and join.busy_s > 0:
            old, new = measures.step_s.get(member), join.busy_s / join.steps
            measures.step_s[member] = mean(old, new, weight=STEP_EMA)
            measures.reports[member] = measures.reports.get(member, 0) + 1
            measures.busy_s[member] = measures.busy_s.get(member, 0.0) + join.busy_s


def share_of(own_s: float, fastest_s: float) -> float:
    """Return the share of a period's steps for a member that needs `own_s` for one step."""
    if not own_s > 0 or not fastest_s > 0:
        return 1.0
    share = fastest_s / own_s
    if share >= 1.0 - DEAD_BAND:
        return 1.0
    return max(SLOWEST, round(share * GRAIN) / GRAIN)


def assign_steps(step_s: Mapping[str, float], members: Iterable[str]) -> dict[str, float]:
    """Return the share of every member that does less than a whole period's steps."""
    known = {member: step_s[member] for member in members if member in step_s}
    fastest = min(known.values(), default=0.0)
    shares = {member: share_of(own, fastest) for member, own in known.items()}
    return {member: share for member, share in shares.items() if share < 1.0}


def too_slow(measures: RoundTimings, members: Iterable[str]) -> dict[str, float]:
    """Return how many times slower than the fastest those are that cannot arrive in time.

    Single steps are noisy: only members are judged of which enough is known.
    """
    known = {
        m: measures.step_s[m]
        for m in members
        if measures.reports.get(m, 0) >= SURE_REPORTS and measures.busy_s.get(m, 0.0) >= SURE_S
    }
    fastest = min(known.values(), default=0.0)
    return {m: own / fastest for m, own in known.items() if fastest and own * SLOWEST > fastest}


def newcomer_pace(own_share: float, *, period_s: float | None, elapsed_s: float) -> float:
    """Return the share of steps for a member that begins in the middle of a period.

    Args:
        own_share: What it would do in a whole period.
        period_s: Measured seconds of a period; None when there is none yet: it then does nothing,
            which holds up nobody.
        elapsed_s: Seconds since the period began.
    """
    left = 0.0 if not period_s else 1.0 - elapsed_s / period_s
    return own_share * min(1.0, left) if left >= LEAST_LEFT else 0.0


FAST_ROUTES = frozenset({"direct", "hierarchical"})
"""Routes on which members dial each other; the relay replaces them for a while if they fail."""

MAX_RELAY_ROUNDS = 64
"""Longest time that a route which failed is left alone."""

MAX_PATIENCE = 8.0


@dataclass
class CommitLog:
    """What is learned from the rounds of one job."""

    measures: RoundTimings = field(default_factory=RoundTimings)
    leases: DataSlots = field(default_factory=lambda: DataSlots(0))
    paced: bool = True
    """Slower members do fewer steps."""
    committed_at: float | None = None
    """When the present period began; None: not known."""
    patience: float = 1.0
    _relay_rounds: int = 0
    _relay_until: int = 0
    _told_slow: set[str] = field(default_factory=set)

    def commit(
        self, attempt: Attempt, verdict: Verdict, trainers: list[str], now: float
    ) -> tuple[Verdict, list[EventRaised]]:
        """Take a committed attempt into the books.

        Args:
            attempt: The attempt.
            verdict: That it is committed.
            trainers: Members that train in the next period.
            now: Present time.

        Returns:
            The verdict with leases and pace in it, and what people should know.
        """
        measures, route = self.measures, attempt.plan.route
        seconds, known = now - attempt.planned_at, measures.duration_s.get(route)
        measures.duration_s[route] = patience.mean(known, seconds)
        if self.committed_at is not None:
            measures.period_s = patience.mean(measures.period_s, now - self.committed_at)
        self.committed_at, self.patience = now, 1.0
        if route in FAST_ROUTES:
            self._relay_rounds = 0
        learn_steps(measures, attempt.joins)
        reached = _reached(attempt, verdict)
        notes = self._take_cursors(reached)
        told = Verdict(
            verdict.round,
            verdict.epoch,
            True,
            verdict.digest,
            verdict.contributors,
            leases=self.leases.renew(trainers) if reached else {},
            pace=assign_steps(measures.step_s, trainers) if self.paced else {},
        )
        return told, notes + self._note_slow(trainers)

    def abort(self, attempt: Attempt) -> None:
        """Draw the lessons of an aborted attempt; one that a loss explains teaches nothing."""
        if attempt.left:
            return
        self.patience = min(MAX_PATIENCE, 2 * self.patience)
        if attempt.plan.route in FAST_ROUTES:
            self._relay_rounds = min(MAX_RELAY_ROUNDS, max(2, 2 * self._relay_rounds))
            self._relay_until = attempt.plan.round + self._relay_rounds

    def relay_only(self, round_: int) -> bool:
        """Return whether a faster route failed lately."""
        return round_ < self._relay_until

    def timeout_s(self, route: str) -> float:
        """Return how long a reduce may take."""
        return patience.timeout_s(self.measures, route, patience=self.patience)

    def newcomer_pace(self, member: str, trainers: list[str], *, now: float, whole: bool) -> float:
        """Return the share of a period's steps for a member that begins now.

        Args:
            member: Who.
            trainers: Those it trains with.
            now: Present time.
            whole: The period begins with it.
        """
        everyone = {*trainers, member}
        shares = assign_steps(self.measures.step_s, everyone) if self.paced else {}
        share = shares.get(member, 1.0)
        if whole:
            return share
        if self.committed_at is None:
            return 0.0
        elapsed_s = now - self.committed_at
        return newcomer_pace(share, period_s=self.measures.period_s, elapsed_s=elapsed_s)

    def set_back(self, cursors: Mapping[int, dict[str, int]]) -> None:
        """Go on from an earlier round."""
        self.committed_at, self._relay_until = None, 0
        self.leases.set_back(cursors)

    def _take_cursors(self, reached: Mapping[str, Lease]) -> list[EventRaised]:
        """Note how far the contributors have read; whatever else was read is dealt again."""
        notes: list[EventRaised] = []
        for member in sorted(reached, key=lambda m: (reached[m].slot != slot_of(m), slot_of(m))):
            wrong = self.leases.wrong(member, reached[member])
            if wrong:
                text = f"the data position of {member} is refused: {wrong}"
                notes.append(EventRaised("refused", text, member))
            else:
                self.leases.take_over(member, reached[member])
        return notes

    def _note_slow(self, trainers: list[str]) -> list[EventRaised]:
        """Name, once, the members that cannot arrive with the others at any pace."""
        slow = too_slow(self.measures, trainers)
        fresh = {m: ratio for m, ratio in slow.items() if m not in self._told_slow}
        self._told_slow |= fresh.keys()
        return [
            EventRaised("too-slow", f"{m} needs {r:.1f} times as long for a step as the fastest", m)
            for m, r in fresh.items()
        ]


def _reached(attempt: Attempt, verdict: Verdict) -> dict[str, Lease]:
    """Return where the data of each contributor stands.

    A contribution that is in the mean counts also when its member was lost before it voted.
    """
    told = {m: join.lease for m, join in attempt.joins.items()}
    told |= {m: vote.lease for m, vote in attempt.votes.items() if vote.ok and vote.lease}
    return {m: lease for m, lease in told.items() if lease and m in verdict.contributors}
