"""Which part of a vector a round exchanges, computed on every member without messages.

A mask cuts the vector into stretches of L entries and takes m neighbours (modulo L) of each; m / L
is the share. The start in each stretch is drawn from a seed: every entry is equally likely, drawing
costs time in proportion to the share, and the positions come sorted.

Dropped updates are drawn from a common seed, so that all members know which ones.

Pruning keeps, of every neuron, the larger values that agree on a sign.

DiLoCo (https://arxiv.org/abs/2311.08105, section 3.1) prunes what a member sends after TIES-merging
(https://arxiv.org/abs/2306.01708): per neuron a sign is elected, then values are trimmed. Neither
defines the order in which values are removed to reach a share. Here a neuron (a row of a matrix, or
a whole tensor with fewer than two dimensions) elects the sign of its sum. Values of the other sign
are removed first, smallest first, then the smallest of the rest.

The vector keeps its length, and a dense codec sends the zeros. Bytes are saved with a sparse codec,
e.g. `topk:0.5` after pruning 0.5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from atoll.codec.seeds import mixed, random_words
from atoll.errors import ConfigError

KINDS = ("random", "rolled")
"""`random`: drawn anew every round; `rolled`: shifted, so that a cycle visits every entry."""

LONGEST = 1 << 16
"""Largest L: shares are rounded to fractions with a denominator up to this."""


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
        selected, stretch = self._fraction.as_integer_ratio()
        return -(-stretch // selected)

    def size(self, number: int) -> int:
        """Return how many positions round `number` has."""
        selected, stretch = self._fraction.as_integer_ratio()
        return self.elements // stretch * selected + len(self._rest(number))

    def at(self, number: int) -> Tensor:
        """Return the positions of round `number`, int64, ascending and distinct."""
        selected, stretch = self._fraction.as_integer_ratio()
        if selected == stretch:
            return torch.arange(self.elements)
        whole = self.elements // stretch
        moved = selected * (number % self.cycle) if self.kind == "rolled" else 0
        drawn = number // self.cycle if self.kind == "rolled" else number
        words = random_words(mixed(self.seed, drawn), whole) % np.uint64(stretch)
        begin = torch.from_numpy(words.astype(np.int64)).unsqueeze(1)
        inside = (begin + moved + torch.arange(selected)).remainder_(stretch)
        if selected > 1:
            inside = inside.sort(dim=1).values
        positions = (inside + stretch * torch.arange(whole).unsqueeze(1)).flatten()
        rest = torch.tensor(self._rest(number), dtype=torch.int64)
        return torch.cat([positions, rest])

    def _rest(self, number: int) -> list[int]:
        """Return the positions behind the last whole stretch; these always roll."""
        selected, stretch = self._fraction.as_integer_ratio()
        whole, rest = divmod(self.elements, stretch)
        inside = sorted({(selected * number + offset) % stretch for offset in range(selected)})
        return [whole * stretch + offset for offset in inside if offset < rest]


def check_probability(probability: float) -> float:
    """Return the probability of dropping updates.

    Raises:
        ConfigError: it is not in 0 <= p < 1.
    """
    if not 0 <= probability < 1:
        raise ConfigError(
            "updates cannot be lost with this probability",
            given=f"drop = {probability}",
            expected="0 up to below 1",
        )
    return probability


def lost_updates(
    members: Sequence[str], *, round_: int, probability: float, seed: int
) -> frozenset[str]:
    """Return the members whose updates are dropped in a round; equal on every member.

    Each draw depends on the member's name, the round and the seed only. If all would be dropped,
    none is: there would be no mean.
    """
    lost = {name for name in members if _draw(name, round_=round_, seed=seed) < probability}
    return frozenset(lost if len(lost) < len(members) else ())


def _draw(member: str, *, round_: int, seed: int) -> float:
    """Return a number, uniform in [0, 1)."""
    text = f"{seed} {round_} {member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) / 2**48


def check_share(share: float) -> float:
    """Return the share to prune.

    Raises:
        ConfigError: it is not in 0 <= share < 1.
    """
    if not 0 <= share < 1:
        raise ConfigError(
            "this share of an update cannot be pruned",
            given=f"prune = {share}",
            expected="0 up to below 1; up to 0.5 hardly changes the loss, 0.75 does",
        )
    return share


@torch.no_grad()
def prune(parts: Sequence[Tensor], share: float) -> None:
    """Set a share of every neuron's values to zero, in place; rounded down per neuron.

    Args:
        parts: Pseudo-gradients in the shapes of the parameters, first dimension the neurons.
        share: Which share, 0 <= share < 1.
    """
    for part in parts:
        rows = part.view(part.shape[0], -1) if part.dim() > 1 else part.view(1, -1)
        count = int(share * rows.shape[1])
        if not count:
            continue
        size = rows.abs()
        # Values against the elected sign are removed before all others, smallest first.
        against = rows.sum(1, keepdim=True) * rows < 0
        order = torch.where(against, size - size.amax(1, keepdim=True) - 1.0, size)
        rows.scatter_(1, order.topk(count, dim=1, largest=False).indices, 0.0)
