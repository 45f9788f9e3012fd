"""What aggregations remember from round to round; lost with the process.

A round may be attempted repeatedly, so the history of an attempt takes effect from the next round
on: a higher round number implies that the last one was committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

MAX_HISTORIES = 256
"""Vectors with a history; the least recently used is dropped first."""


@dataclass(frozen=True, slots=True)
class History:
    """Statistics of one vector's contributions."""

    rounds: int = 0
    log_norm: float = 0.0
    """Moving average of the logarithm of admitted norms."""
    log_norm_square: float = 0.0
    """Moving average of its square."""
    strikes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Member -> rounds in which its contribution was rejected."""
    evicted: frozenset[str] = frozenset()
    """Members with contributions that are no longer accepted."""
    aggregate: Tensor | None = None
    """Result of the last round, (P,)."""


@dataclass(slots=True)
class _Entry:
    """The history up to a round, and with that round included."""

    settled: History
    round: int
    staged: History


class NormHistory:
    """Histories by aggregation and vector. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def before(self, aggregation: str, round_: int) -> History:
        """Return the history of the rounds before `round_` of the vector in `aggregation`."""
        entry = self._entries.get(aggregation)
        if entry is None:
            return History()
        if entry.round < round_:
            entry.settled = entry.staged
        return entry.settled

    def note(self, aggregation: str, round_: int, history: History) -> None:
        """Store the history including `round_`; it takes effect when a later round begins."""
        settled = self.before(aggregation, round_)
        self._entries.pop(aggregation, None)
        self._entries[aggregation] = _Entry(settled, round_, history)
        while len(self._entries) > MAX_HISTORIES:
            del self._entries[next(iter(self._entries))]
