"""Which part of a vector is exchanged in a round: the same on every member, without a message.

The vector is cut into stretches of L entries, and m of each are taken, neighbours modulo L; m / L
is the share. Where they begin in each stretch is drawn from a seed, so every entry is as likely as
any other, drawing costs time for the share and not for the vector, and the positions come sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from atoll.codec.seeds import mixed, random_words
from atoll.errors import ConfigError

KINDS = ("random", "rolled")
"""`random`: drawn anew every round; `rolled`: moves on, so that a cycle visits every entry."""

LONGEST = 1 << 16
"""Largest L: shares are rounded to a fraction with a denominator up to this."""


@dataclass(frozen=True)
class Mask:
    """The positions of each round.

    Raises:
        ConfigError: the share is not in 0 < share <= 1, or the kind is unknown.
    """

    elements: int
    share: float
    kind: str = "random"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                "unknown kind of mask", given=repr(self.kind), expected=" or ".join(KINDS)
            )
        if not 0.0 < self.share <= 1.0:
            raise ConfigError(
                "a mask cannot take this share", given=self.share, expected="above 0, up to 1"
            )

    @property
    def _fraction(self) -> Fraction:
        return max(Fraction(self.share).limit_denominator(LONGEST), Fraction(1, LONGEST))

    @property
    def cycle(self) -> int:
        """Rounds in which a `rolled` mask visits every entry."""
        taken, stretch = self._fraction.as_integer_ratio()
        return -(-stretch // taken)

    def size(self, number: int) -> int:
        """Return how many positions round `number` has; pure."""
        taken, stretch = self._fraction.as_integer_ratio()
        return self.elements // stretch * taken + len(self._rest(number))

    def at(self, number: int) -> Tensor:
        """Return the positions of round `number`, int64, ascending, each once."""
        taken, stretch = self._fraction.as_integer_ratio()
        if taken == stretch:
            return torch.arange(self.elements)
        whole = self.elements // stretch
        moved = taken * (number % self.cycle) if self.kind == "rolled" else 0
        drawn = number // self.cycle if self.kind == "rolled" else number
        words = random_words(mixed(self.seed, drawn), whole) % np.uint64(stretch)
        begin = torch.from_numpy(words.astype(np.int64)).unsqueeze(1)
        inside = (begin + moved + torch.arange(taken)).remainder_(stretch)
        if taken > 1:
            inside = inside.sort(dim=1).values
        positions = (inside + stretch * torch.arange(whole).unsqueeze(1)).flatten()
        rest = torch.tensor(self._rest(number), dtype=torch.int64)
        return torch.cat([positions, rest])

    def _rest(self, number: int) -> list[int]:
        """Return the positions in what is left after the last whole stretch; it only rolls."""
        taken, stretch = self._fraction.as_integer_ratio()
        whole, rest = divmod(self.elements, stretch)
        inside = sorted({(taken * number + offset) % stretch for offset in range(taken)})
        return [whole * stretch + offset for offset in inside if offset < rest]
