"""The length of a gradient is that of the whole model, whatever it is cut into."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.gradient_norm import GradientNorm, Length
from atoll.strategies.inner.sharded_optimizer import clip_factor
from tests.island.pool import Ranks
from tests.island.reference import MODELS, assert_same, batch_for, divided, gradients, plain

dist: Any = torch.distributed

MESHES: list[dict[str, int]] = [
    {},
    {"replicate": 2},
    {"shard": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"pipeline": 2, "tensor": 2},
]
LIMIT = 0.1


def _measured(axes: dict[str, int], limit: float) -> tuple[Length, dict[str, Tensor]]:
    """Return the length of a gradient, and the gradient clipped by it."""
    model = MODELS["gpt"]()
    parts = divided(model, axes, microbatches=2 if "pipeline" in axes else 0)
    norm = GradientNorm(parts)
    parts.backward(*batch_for(model))
    length = norm.measure()
    for parameter in parts.parameters().values():
        assert parameter.grad is not None
        local_of(parameter.grad).mul_(clip_factor(length.value, limit))
    return length, gradients(parts)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.every(4)
def test_norm_and_clipping_equal_those_of_one_device(ranks: Ranks, axes: dict[str, int]) -> None:
    _, whole = plain("gpt")  # embedding and output layer share their weights
    norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in whole.values()))
    assert norm > 2 * LIMIT
    _, clipped = plain("gpt", clip=LIMIT)
    found = ranks.run(math.prod(axes.values()), _measured, axes, LIMIT)
    lengths = {length for length, _ in found}
    assert len(lengths) == 1  # to the last bit
    [length] = lengths
    assert length.finite
    assert length.value == pytest.approx(norm, rel=1e-12)
    named: dict[str, Tensor] = {}
    for _, gradient in found:
        named |= gradient
    assert_same(named, clipped)


def _spoilt(axes: dict[str, int], rank: int, value: float) -> Length:
    """Return what is measured where one rank has one number that is not finite."""
    model = MODELS["gpt"]()
    parts = divided(model, axes, microbatches=2 if "pipeline" in axes else 0)
    parts.backward(*batch_for(model))
    if dist.get_rank() == rank:
        gradient = list(parts.parameters().values())[-1].grad
        assert gradient is not None
        local_of(gradient).flatten()[-1] = value
    return GradientNorm(parts).measure()


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.every(5)
def test_what_is_not_finite_on_one_rank_is_known_to_all(
    ranks: Ranks, axes: dict[str, int], value: float, rank: int
) -> None:
    found = ranks.run(2, _spoilt, axes, rank, value)
    assert [length.finite for length in found] == [False, False]
