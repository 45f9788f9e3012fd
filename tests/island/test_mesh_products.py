"""Stages whose parameters are cut or copied further: gradients are those of one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.gradient_norm import GradientNorm
from atoll.strategies.inner.sharded_optimizer import clip_factor
from tests.island.pipeline.kit import PIPELINE_MODELS, ROWS, merged, pipeline, plain_pipeline, steps
from tests.island.pool import Ranks
from tests.island.reference import assert_same, batch_for, gradients, whole
from tests.tiers import sampled

dist: Any = torch.distributed
INTERLEAVED: dict[str, Any] = {"schedule": "interleaved", "chunks": 2}

TIGHT: dict[str, Any] = {"vocabulary": False, "schedule": "gpipe", "recompute": "full"}
PRODUCTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("gpt", {"pipeline": 2, "tensor": 2}, {}),
    ("gpt", {"pipeline": 2, "tensor": 2}, {"sequence": True, **INTERLEAVED}),
    ("untied", {"pipeline": 2, "tensor": 2}, TIGHT),
    ("untied", {"replicate": 2, "pipeline": 2}, {}),
    ("gpt", {"replicate": 2, "pipeline": 2}, {"accumulate": 2, **INTERLEAVED}),
    ("gpt", {"replicate": 2, "pipeline": 2}, {"accumulate": 2, "schedule": "gpipe"}),
    ("gpt", {"shard": 2, "pipeline": 2}, {}),
    ("gpt", {"shard": 2, "pipeline": 2}, {"reshard": False, "accumulate": 2, "schedule": "gpipe"}),
    ("untied", {"shard": 2, "pipeline": 2}, INTERLEAVED),
]


@pytest.mark.parametrize(
    ("name", "axes", "words"),
    sampled(
        PRODUCTS,
        lambda case: case in (PRODUCTS[1], PRODUCTS[3], PRODUCTS[8]),
        "tests/island/test_mesh_products.py::test_gradients_equal_those_of_one_device",
    ),
)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, axes: dict[str, int], words: dict[str, Any]
) -> None:
    loss, expected = plain_pipeline(name)
    by_rank = ranks.run(4, steps, name, axes, words)
    assert [one[0][0] for one in by_rank] == pytest.approx([loss] * 4, rel=1e-12)
    assert_same(merged([one[0][1] for one in by_rank]), expected)


def _trained(axes: dict[str, int], words: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Return the lengths of gradients and the parameters after three clipped steps."""
    model = PIPELINE_MODELS["gpt"]()
    parts = pipeline(model, axes, **words)
    norm = GradientNorm(parts)
    optimizer = torch.optim.SGD(parts.parameters().values(), lr=0.5, foreach=False)
    lengths = []
    for seed in range(3):
        parts.backward(*batch_for(model, rows=ROWS, seed=seed))
        found = norm.measure()
        factor = clip_factor(found.value, 0.3)
        for parameter in parts.parameters().values():
            assert parameter.grad is not None
            local_of(parameter.grad).mul_(factor)
        optimizer.step()
        lengths.append(found.value)
        parts.loss(*batch_for(model, rows=3))  # in between, nothing old is kept
    values = {name: whole(parameter.detach()) for name, parameter in parts.parameters().items()}
    return lengths, {name: value for name, value in values.items() if value is not None}


def _plainly_trained() -> tuple[list[float], dict[str, Tensor]]:
    model = PIPELINE_MODELS["gpt"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    lengths = []
    for seed in range(3):
        optimizer.zero_grad()
        model.loss(*batch_for(model, rows=ROWS, seed=seed)).backward()
        lengths.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
    return lengths, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"pipeline": 2, "tensor": 2}, {}),
        ({"shard": 2, "pipeline": 2}, INTERLEAVED),
        ({"replicate": 2, "pipeline": 2, "tensor": 2}, {}),
    ],
)
@pytest.mark.every(3)
def test_training_with_clipping_is_that_of_one_device(
    ranks: Ranks, axes: dict[str, int], words: dict[str, Any]
) -> None:
    lengths, expected = _plainly_trained()
    assert min(lengths) > 0.3  # each step is clipped
    found = ranks.run(math.prod(axes.values()), _trained, axes, words)
    for measured, _ in found:
        assert measured == pytest.approx(lengths, rel=1e-8)
    assert_same(merged([values for _, values in found]), expected, within=1e-8)


def _scaled(axes: dict[str, int], scale: float) -> tuple[float, dict[str, Tensor]]:
    model = PIPELINE_MODELS["gpt"]().float()
    parts = pipeline(model, axes, microbatches=2)
    loss = parts.backward(*batch_for(model, rows=ROWS), scale=scale)
    return loss.item(), gradients(parts)


@pytest.mark.parametrize("axes", [{"shard": 2, "pipeline": 2}, {"pipeline": 2, "tensor": 2}])
@pytest.mark.every(2)
def test_a_scale_reaches_every_part_alike(ranks: Ranks, axes: dict[str, int]) -> None:
    plainly, scaled = (ranks.run(4, _scaled, axes, scale) for scale in (1.0, 64.0))
    for (loss, gradient), (other, larger) in zip(plainly, scaled, strict=True):
        assert loss == other
        assert all(torch.equal(larger[name], 64.0 * gradient[name]) for name in gradient)
