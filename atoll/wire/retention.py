"""The rule by which members and the hub decide which checkpoints to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Retention options of `[checkpoint]`."""

    newest: int = 2
    """Number of newest checkpoints; at least one is always kept."""
    every: int = 0
    """Also keep rounds that are multiples of this; 0: none."""
    best: int = 0
    """Also keep so many with the lowest held-out loss; ties go to the later one."""

    def rounds(self, complete: Mapping[int, float | None]) -> set[int]:
        """Return the rounds to keep.

        Args:
            complete: Round -> held-out loss of every complete checkpoint; None: not measured.
        """
        ordered = sorted(complete)
        kept = set(ordered[-max(1, self.newest) :])
        if self.every > 0:
            kept |= {round_ for round_ in ordered if round_ % self.every == 0}
        scores = {r: s for r, s in complete.items() if s is not None and math.isfinite(s)}
        ranked = sorted(scores, key=lambda round_: (scores[round_], -round_))
        return kept | set(ranked[: max(0, self.best)])
