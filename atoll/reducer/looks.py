"""Compares the contributions of a round: their norms and cosine similarities.

If a job's rounds are verified, the reducer reports these to the hub, which has suspicious
contributions computed again (`atoll/verification/scores.py`). Only a secret sample of the elements
is compared, the same in all rounds: n whole vectors would need n * n passes.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import AtollError
from atoll.reducer.block_view import BlockView
from atoll.reducer.mean import Share
from atoll.wire.messages import Look

STRIPS = 4
"""Strips of a vector in the sample, of 32,000 elements each (128,000: the cosine of two independent
vectors of that many is below 0.02)."""


class Looks:
    """Compares one job's contributions, round by round; not thread-safe."""

    def __init__(self, draw: random.Random | None = None) -> None:
        """Draw the sample with `draw`; by default with the operating system's random numbers."""
        self._draw = draw if draw is not None else random.SystemRandom()
        self._strips: dict[int, frozenset[int]] = {}
        self._last: dict[str, Tensor] = {}

    def of(self, shares: Sequence[Share]) -> dict[str, Look]:
        """Return norm and similarities of each contribution that can be decoded and compared."""
        kinds = Counter((share.packet.codec, share.packet.num_elements) for share in shares)
        (codec, size), _ = kinds.most_common(1)[0]
        rows: dict[str, Tensor] = {}
        for share in shares:
            if (share.packet.codec, share.packet.num_elements) == (codec, size) and size:
                # Damaged packets are refused later, when they are summed.
                with suppress(AtollError, RuntimeError, ValueError):
                    rows[share.member] = self._sample(BlockView([share], make_codec(codec)))
        units, looks = {}, {}
        norms = {member: float(row.norm()) for member, row in rows.items()}
        for member, norm in norms.items():
            if math.isfinite(norm):
                units[member] = rows[member] / max(norm, 1e-30)
        total = sum(units.values(), torch.zeros(()))
        for member, unit in units.items():
            others = [other for name, other in units.items() if name != member]
            last = self._last.get(member)
            if last is not None and last.shape == unit.shape:
                others.append(last)
            alike = max((float(unit @ other) for other in others), default=0.0)
            looks[member] = Look(norms[member], alike, _cosine(unit, total - unit))
        self._last = units
        return looks

    def _sample(self, view: BlockView) -> Tensor:
        return torch.cat([view.row(0, start, stop) for start, stop in self._bounds(view)]).double()

    def _bounds(self, view: BlockView) -> list[tuple[int, int]]:
        bounds = list(view.bounds())
        chosen = self._strips.get(len(bounds))
        if chosen is None:
            chosen = frozenset(self._draw.sample(range(len(bounds)), min(STRIPS, len(bounds))))
            self._strips = {len(bounds): chosen}
        return [bounds[at] for at in sorted(chosen)]


def _cosine(unit: Tensor, other: Tensor) -> float:
    """Return the cosine of two vectors, the first of length 1; 0 if the other is zero."""
    length = float(other.norm())
    return float(unit @ other) / length if length > 0.0 else 0.0
