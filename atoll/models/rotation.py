"""Rotary positions: pairs of features rotated by an angle proportional to the position.

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding",
https://arxiv.org/abs/2104.09864, equation 34. The product of a rotated query and key depends only
on their distance.

Differs from the paper: pair `i` is (feature `i`, feature `i + features/2`) instead of neighbours,
which is one roll instead of a shuffle; most published models use this layout.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_tables(length: int, features: int, *, base: float) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines of every position, two tensors ``(length, 1, features)``.

    Pair `i` rotates by `base ** (-2 i / features)` radians per position.
    """
    half = features // 2
    rates = base ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rates
    cosines = torch.cat((angles.cos(), angles.cos()), dim=-1)
    sines = torch.cat((-angles.sin(), angles.sin()), dim=-1)
    return cosines[:, None], sines[:, None]


def turned(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys ``(batch, length, heads, features)`` rotated by their positions."""
    return x * cosines + x.roll(x.shape[-1] // 2, dims=-1) * sines
