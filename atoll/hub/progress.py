"""What a verdict changes beside the count of rounds: leases, pace, patience, and the route."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.hub import measures as patience
from atoll.hub.attempt import Attempt
from atoll.hub.effects import Noted
from atoll.hub.leases import Leases
from atoll.hub.measures import Measures
from atoll.hub.pace import learn_steps, newcomer_pace, paces, too_slow
from atoll.ids import slot_of
from atoll.wire.messages import Lease, Verdict

FAST_ROUTES = frozenset({"direct", "hierarchical"})
"""Routes on which members dial each other; the relay replaces them for a while if they fail."""

MAX_RELAY_ROUNDS = 64
"""Longest time that a route which failed is left alone."""

MAX_PATIENCE = 8.0


@dataclass
class Progress:
    """What is learned from the rounds of one job."""

    measures: Measures = field(default_factory=Measures)
    leases: Leases = field(default_factory=lambda: Leases(0))
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
    ) -> tuple[Verdict, list[Noted]]:
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
            pace=paces(measures.step_s, trainers) if self.paced else {},
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
        shares = paces(self.measures.step_s, everyone) if self.paced else {}
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

    def _take_cursors(self, reached: Mapping[str, Lease]) -> list[Noted]:
        """Note how far the contributors have read; whatever else was read is dealt again."""
        notes: list[Noted] = []
        for member in sorted(reached, key=lambda m: (reached[m].slot != slot_of(m), slot_of(m))):
            wrong = self.leases.wrong(member, reached[member])
            if wrong:
                text = f"the data position of {member} is refused: {wrong}"
                notes.append(Noted("refused", text, member))
            else:
                self.leases.take_over(member, reached[member])
        return notes

    def _note_slow(self, trainers: list[str]) -> list[Noted]:
        """Name, once, the members that cannot arrive with the others at any pace."""
        slow = too_slow(self.measures, trainers)
        fresh = {m: ratio for m, ratio in slow.items() if m not in self._told_slow}
        self._told_slow |= fresh.keys()
        return [
            Noted("too-slow", f"{m} needs {r:.1f} times as long for a step as the fastest", m)
            for m, r in fresh.items()
        ]


def _reached(attempt: Attempt, verdict: Verdict) -> dict[str, Lease]:
    """Return where the data of each contributor stands.

    A contribution that is in the mean counts also when its member was lost before it voted.
    """
    told = {m: join.lease for m, join in attempt.joins.items()}
    told |= {m: vote.lease for m, vote in attempt.votes.items() if vote.ok and vote.lease}
    return {m: lease for m, lease in told.items() if lease and m in verdict.contributors}
