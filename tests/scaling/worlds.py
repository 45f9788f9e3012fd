"""Points of laws with known constants."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from atoll.scaling.points import Point

E, A, B, a, b = 1.8172, 482.01, 2085.43, 0.3478, 0.3658
"""The refit of Hoffmann et al. by Besiroglu et al. 2024 (https://arxiv.org/abs/2404.10102)."""

SIZES = (1e7, 5e7, 2e8, 1e9)
TOKENS = (1e9, 5e9, 2e10)


def loss_of(params: float, tokens: float) -> float:
    """Return the loss of the law."""
    return float(E + A / params**a + B / tokens**b)


def world(
    *,
    sizes: Sequence[float] = SIZES,
    tokens: Sequence[float] = TOKENS,
    members: Sequence[float] = (1,),
    every: Sequence[float] = (1,),
    m: float = 0.0,
    h: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Point]:
    """Return a point for each combination; M^m H^h multiplies the whole loss."""
    draw = np.random.default_rng(seed)
    return [
        Point(
            params=n, tokens=d, members=k, every=steps, name=f"{n:g}-{d:g}-{k:g}-{steps:g}",
            loss=loss_of(n, d) * k**m * steps**h * float(np.exp(noise * draw.standard_normal())),
        )
        for n, d, k, steps in itertools.product(sizes, tokens, members, every)
    ]  # fmt: skip


def changed(point: Point, field: str, value: float) -> Point:
    """Return a point with another value in one field."""
    changes: dict[str, Any] = {field: value}
    return dataclasses.replace(point, **changes)
