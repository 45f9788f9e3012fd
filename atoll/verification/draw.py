"""Who is challenged: drawn after the commitments of a round are in, so nobody can know before.

 * Every member-round with the same probability, `share`.
 * A newcomer once within its first `first_rounds` rounds, in one that is drawn and kept secret.
 * A member with a strike in every round, until it has passed `CLEAR` of them.
 * A member whose challenge came to nothing (it left, the hub restarted), in its next round.
 * A member whose contribution looks odd (`scores.py`), as far as the budget for these lasts.

The last four find those that cheat from the beginning, or openly, within few rounds, at a share of
the cost of more challenges for everyone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol

CLEAR = 3
"""Challenges in a row that a member with a strike has to pass before it counts as any other."""

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
    again: set[str] = field(default_factory=set)
    """Members whose last challenge came to nothing."""
    _due: dict[str, int] = field(default_factory=dict)
    """Newcomer -> the round in which it is challenged; -1: it was."""
    _budget: float = 1.0

    def drawn(
        self, round_: int, members: Iterable[str], *, odd: Collection[str] = ()
    ) -> dict[str, str]:
        """Return the members to challenge for a round, each with the reason."""
        found: dict[str, str] = {}
        for member in members:
            due = self._due.setdefault(member, round_ + self.random.randrange(self.first_rounds))
            by_chance = self.random.random() < self.share
            self._budget = min(BURST, self._budget + SUSPICION_SHARE)
            if member in self.watched:
                found[member] = "strike"
            elif member in self.again:
                found[member] = "again"
            elif 0 <= due <= round_:
                found[member] = "newcomer"
            elif member in odd and self._budget >= 1.0:
                self._budget -= 1.0
                found[member] = "odd contribution"
            elif by_chance:
                found[member] = "chance"
        return found

    def challenged(self, member: str) -> None:
        """A challenge of this member began; until then a newcomer stays due."""
        self._due[member] = -1
        self.again.discard(member)

    def struck(self, member: str) -> None:
        """A member got a strike."""
        self.watched[member] = CLEAR

    def passed(self, member: str) -> None:
        """A member has passed a challenge."""
        left = self.watched.pop(member, 1) - 1
        if left > 0:
            self.watched[member] = left

    def forget(self, member: str) -> None:
        """A member is gone for good."""
        self.watched.pop(member, None)
        self.again.discard(member)
        self._due.pop(member, None)
