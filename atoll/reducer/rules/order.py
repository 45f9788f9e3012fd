"""Coordinate-wise median and trimmed mean.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates"
(https://arxiv.org/abs/1803.01498), definitions 1 and 2. Values are added in sorted order, so the
result does not depend on the order of members.
"""

from __future__ import annotations

import torch
from torch import Tensor


def median(matrix: Tensor) -> Tensor:
    """Return the median of every column of finite values, (n, w); reorders the rows.

    With an even number of rows it is the mean of the middle two.
    """
    ordered, half = _ordered(matrix), len(matrix) // 2
    if len(matrix) % 2:
        return ordered[half]
    return ordered[half - 1] * 0.5 + ordered[half] * 0.5


def trimmed_mean(matrix: Tensor, *, bad: int) -> Tensor:
    """Return the mean of every column without its `bad` largest and `bad` smallest values.

    The matrix, (n, w) with n > 2 * bad, has finite values; its rows are reordered.
    """
    ordered = _ordered(matrix)
    return ordered[bad : len(matrix) - bad].mean(0)


def _ordered(matrix: Tensor) -> Tensor:
    """Sort every column in place by exchanges between rows: faster than a sort for few rows."""
    larger = torch.empty_like(matrix[0])
    for last in range(len(matrix) - 1, 0, -1):
        for index in range(last):
            low, high = matrix[index], matrix[index + 1]
            torch.maximum(low, high, out=larger)
            torch.minimum(low, high, out=low)
            high.copy_(larger)
    return matrix
