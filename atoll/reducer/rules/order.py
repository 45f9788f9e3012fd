"""Coordinate median and trimmed mean: each coordinate by itself, by rank.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
(https://arxiv.org/abs/1803.01498), definitions 1 and 2. Values are added in the order of their
size, so that it does not matter at all who sent which.
"""

from __future__ import annotations

import torch
from torch import Tensor


def median(matrix: Tensor) -> Tensor:
    """Return the median of every column; of an even number of rows the middle of two.

    Args:
        matrix: Finite values, (n, w); its rows are reordered.
    """
    ordered, half = _ordered(matrix), len(matrix) // 2
    if len(matrix) % 2:
        return ordered[half]
    return ordered[half - 1] * 0.5 + ordered[half] * 0.5


def trimmed_mean(matrix: Tensor, *, bad: int) -> Tensor:
    """Return the mean of every column without its `bad` largest and `bad` smallest values.

    Args:
        matrix: Finite values, (n, w), n > 2 * bad; its rows are reordered.
        bad: How many members may be wrong.
    """
    ordered = _ordered(matrix)
    return ordered[bad : len(matrix) - bad].mean(0)


def _ordered(matrix: Tensor) -> Tensor:
    """Sort every column in place by exchanging rows' elements: for few rows faster than a sort."""
    larger = torch.empty_like(matrix[0])
    for last in range(len(matrix) - 1, 0, -1):
        for index in range(last):
            low, high = matrix[index], matrix[index + 1]
            torch.maximum(low, high, out=larger)
            torch.minimum(low, high, out=low)
            high.copy_(larger)
    return matrix
