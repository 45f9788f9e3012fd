"""Distances between contributions, the only input of Krum, clipping and the geometric median.

Each of these rules returns factors of a weighted sum, computed from the n x n distances alone. The
vectors are therefore read twice, however many iterations a rule makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Points(Protocol):
    """n vectors that are read strip by strip."""

    def __len__(self) -> int:
        """Return n."""

    def strips(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the columns of a strip and all vectors there, (n, w)."""


Squares = Sequence[Sequence[float]]
"""Squared Euclidean distances, n x n."""


def squared_distances(rows: Points, *, anchor: Tensor | None = None) -> list[list[float]]:
    """Return the squared distances between all rows of finite values, summed in fp64.

    An `anchor`, (P,), is inserted as row 0.
    """
    first = 0 if anchor is None else 1
    total = torch.zeros(len(rows) + first, len(rows) + first, dtype=torch.float64)
    for where, strip in rows.strips():
        points = strip.double()
        if anchor is not None:
            points = torch.cat([anchor[where].double().unsqueeze(0), points])
        for index in range(len(points) - 1):
            total[index, index + 1 :] += (points[index + 1 :] - points[index]).square_().sum(1)
    return (total + total.T).tolist()


def distances_from(squares: Squares, factors: Sequence[float]) -> list[float]:
    """Return the distance of each point from the weighted mean of all; the factors add up to 1."""
    to_mean = [math.fsum(f * s for f, s in zip(factors, row, strict=True)) for row in squares]
    spread = 0.5 * math.fsum(f * s for f, s in zip(factors, to_mean, strict=True))
    return [math.sqrt(max(0.0, square - spread)) for square in to_mean]
