"""Piecewise cosine transform (DCT) of tensors.

A tensor is cut into pieces of `side` x `side` (or `side`, if it has one dimension), and each is
transformed (DCT-II, orthonormal): similar neighbouring values become few large coefficients. The
side is the largest divisor of the length up to a limit; a length without a useful divisor, e.g. a
prime, is padded with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LEAST_SHARE = 4
"""Divisors below this fraction (a quarter) of the limit are not used: the length is padded
instead."""

_GRID = 2.0**40
"""Entries are rounded to multiples of 2^-40, so that the libraries' last bits do not matter."""


def cosines(side: int) -> Tensor:
    """Return the matrix of the orthonormal cosines in its rows, float64, shape (side, side)."""
    index = np.arange(side)
    waves = np.cos(np.pi * (2 * index + 1) * index[:, None] / (2 * side))
    waves *= np.where(index == 0, math.sqrt(1 / side), math.sqrt(2 / side))[:, None]
    return torch.from_numpy(np.round(waves * _GRID) / _GRID)


def divided(length: int, limit: int) -> tuple[int, int]:
    """Return the side of the pieces along a dimension, and their number."""
    side = max((d for d in range(1, min(limit, length) + 1) if length % d == 0), default=1)
    if side * LEAST_SHARE < min(limit, length):
        side = min(limit, length)
    return side, -(-length // side)


@dataclass(frozen=True)
class Pieces:
    """How one tensor is cut, as a matrix of its first dimension by all others."""

    rows: int
    columns: int
    height: int
    width: int
    down: int
    """Pieces along the rows."""
    across: int
    """Pieces along the columns."""

    @classmethod
    def of(cls, shape: Sequence[int], *, limit: int = 64) -> Pieces:
        """Return the pieces of a tensor with sides up to `limit`."""
        size = math.prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        (height, down), (width, across) = divided(rows, limit), divided(columns, limit)
        return cls(rows, columns, height, width, down, across if size else 0)

    @property
    def count(self) -> int:
        """Number of pieces."""
        return self.down * self.across

    @property
    def size(self) -> int:
        """Elements of one piece."""
        return self.height * self.width

    def coefficients(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the coefficients of a flat tensor, shape (count, size).

        `left` is `cosines(height)` and `right` `cosines(width)`, in the type of `x`.
        """
        padded = x.new_zeros(self.down * self.height, self.across * self.width)
        padded[: self.rows, : self.columns] = x.view(self.rows, self.columns)
        pieces = padded.view(self.down, self.height, self.across, self.width).transpose(1, 2)
        return (left @ pieces @ right.T).reshape(self.count, self.size)

    def values(self, coefficients: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Return the flat tensor of coefficients: the inverse of `coefficients`."""
        pieces = coefficients.view(self.down, self.across, self.height, self.width)
        whole = (left.T @ pieces @ right).transpose(1, 2)
        whole = whole.reshape(self.down * self.height, self.across * self.width)
        return whole[: self.rows, : self.columns].reshape(-1)
