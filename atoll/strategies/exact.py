"""Sums and products whose rounding is the same on every machine.

Library routines (matrix products, long sums, factorisations) add in an order that depends on the
processor. What follows from common values on every member by itself must not: replicas would drift
apart. These use elementwise operations only, which IEEE 754 rounds alike everywhere.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atoll.codec.seeds import random_words

DEPENDENT = 1e-6
"""A column that keeps less than this share of its length is taken for a combination of others."""


def tree_sum(x: Tensor) -> Tensor:
    """Return the sum over the first dimension: halves are added until one row is left."""
    if not x.shape[0]:
        return x.new_zeros(x.shape[1:])
    while x.shape[0] > 1:
        half = (x.shape[0] + 1) // 2
        upper = x[:half].clone()
        upper[: x.shape[0] - half] += x[half:]
        x = upper
    return x[0]


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns of the same span, float64, shape (n, r).

    Gram-Schmidt, each column projected twice; columns that depend on those before become zero.
    """
    basis = columns.double().clone()
    for index in range(basis.shape[1]):
        column = basis[:, index].clone()
        before = _length(column)
        for _ in range(2 if index else 0):
            shares = tree_sum(basis[:, :index] * column.unsqueeze(1))
            for earlier, share in enumerate(shares):
                column -= basis[:, earlier] * share
        after = _length(column)
        basis[:, index] = column / after if after > DEPENDENT * before else 0.0
    return basis


def outer_sum(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Return `left @ right.T` in `out`, shape (n, m), adding one pair of columns after another."""
    out.zero_()
    for index in range(left.shape[1]):
        out += left[:, index : index + 1] * right[:, index]
    return out


def _length(column: Tensor) -> float:
    return float(tree_sum(column * column).sqrt())


def uniform(elements: int, *, seed: int) -> Tensor:
    """Return float32 numbers from -1 to 1 that follow from the seed alone."""
    words = random_words(seed, elements) >> np.uint64(11)
    return torch.from_numpy(words.astype(np.float64) * 2.0**-52 - 1.0).float()
