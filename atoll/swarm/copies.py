"""Copies of sums, against the loss of a member in the middle of a step.

What a member has folded in a step is lost with it, and has to be computed again: with long steps
and frequent losses most work would be. So each member sends its sum now and then to the next member
of its stage, which keeps the newest copy and informs the ledger. If the member is lost its keeper
adds the copy to its own sum, and only what was folded since is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from atoll.wire.swarm import Copy, Holder, Share, SwarmPeer

EVERY_S = 5.0
"""Least time between two copies of a member's sum: what it loses at most."""
SPARE = 8.0
"""Copies take at most one of so many parts of the time, on slow networks."""


@dataclass
class Copies:
    """The copies that one member keeps, and when to send one of its own sum."""

    every_s: float = EVERY_S
    _kept: dict[int, Copy] = field(default_factory=dict)
    _unanswered: set[int] = field(default_factory=set)
    _number: int = 0
    _copied: int = 0
    """Shares in the last copy that was sent."""
    _next_at: float = 0.0
    _sending: bool = False

    def clear(self, now: float) -> None:
        """The step is over, or everything is dropped."""
        self._kept.clear()
        self._unanswered.clear()
        self._copied, self._next_at = 0, now + self.every_s

    # ------------------------------------------------------------------- of the own sum

    def due(
        self, me: Holder, stage: int, table: Iterable[SwarmPeer], folded: Collection[Share],
        now: float,
    ) -> Holder | None:  # fmt: skip
        """Return the member to which to send a copy of the own sum now, if any."""
        if self._sending or now < self._next_at or len(folded) <= self._copied:
            return None
        others = sorted(p.holder for p in table if p.stage == stage and p.member != me.member)
        return next((other for other in others if other > me), others[0] if others else None)

    def sent(self, shares: int) -> None:
        """A copy with so many shares is on its way; there is one at a time."""
        self._copied, self._sending = shares, True

    def arrived(self, took_s: float, now: float) -> None:
        """It has arrived, or failed, after so long."""
        self._sending, self._next_at = False, now + max(self.every_s, SPARE * took_s)

    # ------------------------------------------------------------------- of other sums

    def keep(self, copy: Copy) -> int:
        """Keep a copy, until the ledger has answered; return its number, for `SwarmKept`."""
        self._number += 1
        self._kept[self._number] = copy
        self._unanswered.add(self._number)
        return self._number

    def asks(self, number: int) -> bool:
        """Return whether the ledger has not answered yet."""
        return number in self._unanswered

    def kept(self, number: int, *, used: bool) -> list[int]:
        """The ledger has answered; return the copies that are not needed any more."""
        if number not in self._unanswered:
            return []
        self._unanswered.discard(number)
        of = self._kept[number].of
        older = [n for n, copy in self._kept.items() if copy.of == of and n < number]
        gone = older if used else [number]
        for n in gone:
            del self._kept[n]
            self._unanswered.discard(n)
        return gone

    def take(self, number: int) -> Copy | None:
        """Return a copy to add it to the own sum, once; None: it is not here."""
        self._unanswered.discard(number)
        return self._kept.pop(number, None)
