"""What whoever combines contributions remembers from round to round; lost with its process.

A round may be tried more than once. What an attempt leaves behind therefore counts only from the
next round on: rounds advance by being committed, so that nobody has to tell of verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

MAX_HISTORIES = 256
"""Vectors that are remembered; whichever was not used for longest is forgotten first."""


@dataclass(frozen=True, slots=True)
class History:
    """What is known of one vector's contributions."""

    rounds: int = 0
    """Rounds that were filtered."""
    log_norm: float = 0.0
    """Mean of the logarithm of admitted norms, newer ones counting more."""
    log_norm_square: float = 0.0
    """Mean of its square."""
    strikes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Member -> rounds in which its contribution was rejected."""
    evicted: frozenset[str] = frozenset()
    """Members that nothing is taken from any more."""
    aggregate: Tensor | None = None
    """What the last round came to, (P,)."""


@dataclass(slots=True)
class _Entry:
    """The history up to a round, and what that round adds if it is committed."""

    settled: History
    round: int
    staged: History


class NormHistory:
    """Histories by policy and vector; used by one thread at a time."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._entries: dict[str, _Entry] = {}

    def before(self, policy: str, round_: int) -> History:
        """Return what is known of the rounds before `round_`.

        Args:
            policy: The text that came with the contributions; it names the vector, too.
            round_: The round that is being combined.
        """
        entry = self._entries.get(policy)
        if entry is None:
            return History()
        if entry.round < round_:
            entry.settled = entry.staged
        return entry.settled

    def note(self, policy: str, round_: int, history: History) -> None:
        """Keep what will be known after `round_`, if that is committed."""
        settled = self.before(policy, round_)
        self._entries.pop(policy, None)
        self._entries[policy] = _Entry(settled, round_, history)
        while len(self._entries) > MAX_HISTORIES:
            del self._entries[next(iter(self._entries))]
