"""Which checkpoints are kept: one rule for members that write folders and for the hub."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What `[checkpoint]` says about keeping."""

    newest: int = 2
    """How many of the newest; at least one is kept whatever is written here."""
    every: int = 0
    """Also those whose round is a multiple of this; 0: none."""
    best: int = 0
    """Also so many with the lowest held-out loss; of equal ones the later."""

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
