"""Who is challenged: drawn after the commitments of a round are in, so no member can know before.

 * Every member-round with the same probability, `share`. A newcomer's first check counts towards
   it: until that is made up for, chance draws this member only `MEANWHILE` times as often.
 * A newcomer once within its first `first_rounds` rounds, in one that is drawn and kept secret, or
   at once if its contribution looks odd.
 * A member with a strike in every round, until it has passed `CLEAR` of them.
 * A member that accused another one falsely has to compute another's round again in every round,
   until it has accused no one in `CLEAR` of them.
 * A member whose challenge came to nothing (it left, the hub restarted), in its next round.
 * A member whose contribution looks odd (`scores.py`), as far as the budget for these lasts.

The others find those that cheat from the beginning, or openly, within few rounds, at a share of
the cost of more challenges for everyone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

CLEAR = 3
"""Challenges in a row that a member with a strike has to pass before it counts as any other."""

MEANWHILE = 0.1
"""Part of its probability that is left to a member whose first check is not made up for. With 0.25
the first 20 rounds of eight members would cost 6.1 % on average, with 0.1 5.8 % (bench/audit)."""

FIRST_ROUNDS = 5
"""Rounds within which a newcomer is challenged. In a run of 20 rounds two of eight members that
skip steps cost 0.7 % of the loss so, 0.8 % with ten rounds (bench/audit)."""

SUSPICION_SHARE = 0.01
"""Challenges for odd contributions, as a share of all member-rounds."""

BURST = 2.0
"""How many of these may come at once."""


class RandomNumbers(Protocol):
    """A source of random numbers; `random.SystemRandom` on a hub."""

    def random(self) -> float:
        """Return a number of 0 up to below 1."""
        ...

    def randrange(self, stop: int, /) -> int:
        """Return a whole number below `stop`."""
        ...


@dataclass
class Draw:
    """The draws of one job; see the module's docstring."""

    random: RandomNumbers
    share: float
    first_rounds: int = FIRST_ROUNDS
    watched: dict[str, int] = field(default_factory=dict)
    """Members with a strike -> challenges that they still have to pass."""
    on_trial: dict[str, int] = field(default_factory=dict)
    """Members that accused falsely -> rounds of others that they still have to compute rightly."""
    again: set[str] = field(default_factory=set)
    """Members whose last challenge came to nothing."""
    _due: dict[str, int] = field(default_factory=dict)
    """Newcomer -> the round in which it is challenged; -1: it was."""
    _ahead: dict[str, float] = field(default_factory=dict)
    """Member -> share of its first check that its later rounds have to make up for."""
    _budget: float = 1.0

    def drawn(
        self, round_: int, members: Iterable[str], *, odd: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the members to challenge for a round, each with the reason."""
        found: dict[str, str] = {}
        for member in members:
            due = self._due.setdefault(member, round_ + self.random.randrange(self.first_rounds))
            by_chance = self.random.random() < self._probability(member)
            self._budget = min(BURST, self._budget + SUSPICION_SHARE)
            if member in self.watched:
                found[member] = "strike"
            elif member in self.again:
                found[member] = "again"
            elif due >= 0 and member in odd:
                found[member] = "odd contribution"
            elif 0 <= due <= round_:
                found[member] = "newcomer"
            elif member in odd and self._budget >= 1.0:
                self._budget -= 1.0
                found[member] = "odd contribution"
            elif by_chance:
                found[member] = "chance"
        return found

    def _probability(self, member: str) -> float:
        """Return with which probability a round of a member is drawn by chance."""
        ahead = self._ahead.get(member, 0.0)
        if ahead <= 0.0 or self.share >= 1.0:  # no member is left out where all are checked
            return self.share
        self._ahead[member] = ahead - (1.0 - MEANWHILE) * self.share
        return MEANWHILE * self.share

    @property
    def distrusted(self) -> frozenset[str]:
        """Members with a strike that have not made up for it: without weight, and never judges."""
        return frozenset(self.watched) | frozenset(self.on_trial)

    def challenged(self, member: str) -> None:
        """A challenge of this member began; until then a newcomer stays due."""
        if self._due.get(member, -1) >= 0:
            self._ahead[member] = 1.0
        self._due[member] = -1
        self.again.discard(member)

    def struck(self, member: str) -> None:
        """A member got a strike."""
        self.watched[member] = CLEAR

    def accused(self, member: str, *, falsely: bool) -> None:
        """A member has computed a round of another one again, and what it named was settled."""
        left = CLEAR if falsely else self.on_trial.pop(member, 1) - 1
        if left > 0:
            self.on_trial[member] = left

    def passed(self, member: str) -> None:
        """A member has passed a challenge."""
        left = self.watched.pop(member, 1) - 1
        if left > 0:
            self.watched[member] = left

    def forget(self, member: str) -> None:
        """A member is gone for good."""
        self.watched.pop(member, None)
        self.on_trial.pop(member, None)
        self.again.discard(member)
        for known in (self._due, self._ahead):
            known.pop(member, None)
