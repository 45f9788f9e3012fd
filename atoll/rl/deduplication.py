"""Which trajectories the critic has had already: each counts once, whatever arrives twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_GAPS = 4_096
"""Numbers beyond the last gap of one actor that are remembered."""


class SeenSequences:
    """The numbers of one actor's trajectories that were read."""

    def __init__(self, floor: int = 0, above: tuple[int, ...] = ()) -> None:
        """Everything up to `floor` was read, and what is in `above`."""
        self._floor = floor
        self._above = set(above)

    @property
    def highest(self) -> int:
        """The last number that was read."""
        return max(self._above, default=self._floor)

    @property
    def missing(self) -> int:
        """How many below the last one were not read, as far as is remembered."""
        return self.highest - self._floor - len(self._above)

    def add(self, sequence: int) -> bool:
        """Note a number; return False if it was read before."""
        if sequence <= self._floor or sequence in self._above:
            return False
        self._above.add(sequence)
        while self._floor + 1 in self._above:
            self._floor += 1
            self._above.discard(self._floor)
        if len(self._above) > MOST_GAPS:  # what is still missing down there never came
            ordered = sorted(self._above)
            self._floor = ordered[MOST_GAPS // 4]
            self._above = set(ordered[MOST_GAPS // 4 + 1 :])
        return True

    def to_list(self) -> list[Any]:
        """Return it for a saved state."""
        return [self._floor, sorted(self._above)]

    @classmethod
    def from_list(cls, saved: list[Any]) -> SeenSequences:
        """Return what `to_list` wrote."""
        return cls(int(saved[0]), tuple(int(n) for n in saved[1]))


def load_seen(saved: Mapping[str, list[Any]]) -> dict[str, SeenSequences]:
    """Return the numbers of all actors from a saved state."""
    return {actor: SeenSequences.from_list(value) for actor, value in saved.items()}
