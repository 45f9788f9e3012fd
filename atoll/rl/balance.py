"""Batches in which every policy weighs the same, whatever its share of the experience."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.rl.trajectory import Trajectory


def in_order(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the indices of trajectories by policy, actor and sequence.

    A batch is learned in this order, so that it does not matter which one arrived first.
    """
    keys = [(t.policy, t.actor, t.sequence) for t in trajectories]
    return sorted(range(len(trajectories)), key=keys.__getitem__)


@dataclass(frozen=True, slots=True)
class Part:
    """One minibatch."""

    rows: list[Tensor]
    """For each group its rows of this minibatch, counted from the group's first."""
    weights: Tensor
    """[N] over all of them: each group's add up to the same, all to 1."""


def minibatches(counts: Sequence[int], *, parts: int, generator: torch.Generator) -> Iterator[Part]:
    """Yield a pass over all rows in `parts` minibatches, each with a share of every group.

    A group's rows in one minibatch have the same weight together as those of any other group.

    Args:
        counts: Rows of each group.
        parts: How many minibatches.
        generator: Draws the order.
    """
    drawn = [torch.randperm(n, generator=generator).tensor_split(parts) for n in counts]
    for chosen in zip(*drawn, strict=True):
        rows = list(chosen)
        present = sum(1 for part in rows if len(part))
        if present:
            shares = [torch.full((len(p),), 1.0 / (present * max(1, len(p)))) for p in rows]
            yield Part(rows, torch.cat(shares))
