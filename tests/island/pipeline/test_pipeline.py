"""Models in stages on several ranks: gradients and losses are those of one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from tests.island.pipeline.kit import PIPELINE_MODELS, ROWS, merged, pipeline, plain_pipeline, steps
from tests.island.pool import Ranks
from tests.island.reference import Perceptron, assert_same, batch_for, gradients

dist: Any = torch.distributed

FREE = ("gpipe", "opportunistic")
"""Schedules with any number of microbatches."""

CASES = [
    (name, ranks, schedule, [m for m in (2, 4, 8) if schedule in FREE or m >= ranks])
    for name in ("gpt", "untied")
    for ranks in (2, 4)
    for schedule in ("gpipe", "1f1b", "opportunistic", "interleaved")
]


@pytest.mark.parametrize(("name", "count", "schedule", "microbatches"), CASES)
@pytest.mark.every(3)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, count: int, schedule: str, microbatches: list[int]
) -> None:
    loss, expected = plain_pipeline(name)
    words = {"schedule": schedule, "chunks": 2 if schedule == "interleaved" else 1}
    by_rank = ranks.run(count, steps, name, {"pipeline": count}, words, microbatches)
    for place in range(len(microbatches)):
        found = [one[place] for one in by_rank]
        assert [one for one, _ in found] == pytest.approx([loss] * count, rel=1e-12)
        assert_same(merged([gradient for _, gradient in found]), expected)


@pytest.mark.parametrize(
    "words",
    [
        {"microbatches": 4},
        {"cuts": (1,)},
        {"accumulate": 2},
        {"accumulate": 2, "schedule": "gpipe"},
        {"recompute": "full"},
    ],
)
@pytest.mark.every(3)
def test_a_sequence_of_layers_needs_no_change(ranks: Ranks, words: dict[str, Any]) -> None:
    loss, expected = plain_pipeline("perceptron")
    by_rank = ranks.run(2, steps, "perceptron", {"pipeline": 2}, words)
    assert [one[0][0] for one in by_rank] == pytest.approx([loss] * 2, rel=1e-12)
    assert all(0 < len(one[0][1]) < len(expected) for one in by_rank)
    assert_same(merged([one[0][1] for one in by_rank]), expected)


def _trained(name: str, words: dict[str, Any]) -> dict[str, Tensor]:
    model = PIPELINE_MODELS[name]()
    parts = pipeline(model, {"pipeline": 2}, **words)
    optimizer = torch.optim.AdamW(parts.parameters().values(), lr=0.01)
    for seed in range(3):
        parts.backward(*batch_for(model, rows=ROWS, seed=seed))
        optimizer.step()
    return {key: parameter.detach() for key, parameter in parts.parameters().items()}


def test_copies_of_a_tied_weight_stay_equal_and_right(ranks: Ranks) -> None:
    model = PIPELINE_MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        optimizer.zero_grad()
        model.loss(*batch_for(model, rows=ROWS, seed=seed)).backward()
        optimizer.step()
    first, last = ranks.run(2, _trained, "gpt", {"schedule": "interleaved", "chunks": 2})
    assert torch.equal(first["embedding.weight"], last["embedding.weight"])
    assert_same(merged([first, last]), dict(model.named_parameters()), within=1e-9)


def _losses(axes: dict[str, int], words: dict[str, Any], rows: list[int]) -> list[float]:
    model = PIPELINE_MODELS["gpt"]()
    inputs, targets = batch_for(model, rows=max(rows))
    parts = pipeline(model, axes, **words)
    before = parts.loss(inputs, targets)
    assert all(p.grad is None for p in parts.parameters().values())
    found = [parts.loss(inputs[:n], targets[:n]).item() for n in rows]
    parts.backward(inputs[:8], targets[:8])
    assert torch.equal(parts.loss(inputs, targets), before)
    return found


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"pipeline": 2}, {}),
        ({"pipeline": 4}, {"schedule": "gpipe"}),
        ({"pipeline": 2}, {"schedule": "interleaved", "chunks": 3}),
        ({"pipeline": 2, "shard": 2}, {}),
    ],
)
@pytest.mark.every(3)
def test_any_number_of_rows_can_be_evaluated(
    ranks: Ranks, axes: dict[str, int], words: dict[str, Any]
) -> None:
    rows = [1, 2, 5, 8, 13]
    model = PIPELINE_MODELS["gpt"]()
    inputs, targets = batch_for(model, rows=max(rows))
    with torch.no_grad():
        expected = [model.loss(inputs[:n], targets[:n]).item() for n in rows]
    for found in ranks.run(math.prod(axes.values()), _losses, axes, words, rows):
        assert found == pytest.approx(expected, rel=1e-12)


def _scaled(precision: str, scale: float) -> tuple[float, dict[str, Tensor]]:
    model = PIPELINE_MODELS["gpt"]().float()
    parts = pipeline(model, {"pipeline": 2}, precision=precision, microbatches=4)
    loss = parts.backward(*batch_for(model, rows=ROWS), scale=scale)
    return loss.item(), gradients(parts)


def test_a_scale_is_in_the_gradients_and_not_in_the_loss(ranks: Ranks) -> None:
    plainly, scaled = (ranks.run(2, _scaled, "fp32", scale) for scale in (1.0, 64.0))
    for (loss, gradient), (other, larger) in zip(plainly, scaled, strict=True):
        assert loss == other
        assert all(torch.equal(larger[name], 64.0 * gradient[name]) for name in gradient)


def test_stages_compute_in_half_precision(ranks: Ranks) -> None:
    expected_loss, expected = plain_pipeline("gpt")
    by_rank = ranks.run(2, _scaled, "bf16", 1.0)
    found = merged([gradient for _, gradient in by_rank])
    assert 1e-7 < abs(by_rank[0][0] - expected_loss) < 0.02
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32
        assert (tensor - expected[name]).norm() < 0.1 * expected[name].norm(), name


class _Running(Perceptron):
    """Layers of which one keeps running means."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 2))

    @property
    def means(self) -> nn.BatchNorm1d:
        found = self[2]
        assert isinstance(found, nn.BatchNorm1d)
        return found


def _running() -> _Running:
    torch.manual_seed(3)
    return _Running().double()


def _means(axes: dict[str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = _running()
    parts = pipeline(model, axes, microbatches=4, cuts=(2,))
    parts.backward(*batch_for(model, rows=ROWS))
    parts.train(False)
    parts.loss(*batch_for(model, rows=ROWS, seed=5))
    return dict(parts.buffers()), gradients(parts)


def _in_parts(rows: slice) -> _Running:
    model = _running()
    inputs, targets = (t[rows].chunk(4) for t in batch_for(model, rows=ROWS))
    losses = [model.loss(*part) / 4 for part in zip(inputs, targets, strict=True)]
    torch.autograd.backward(losses)
    return model


def test_running_means_see_microbatches_and_nothing_else(ranks: Ranks) -> None:
    model = _in_parts(slice(None))
    (nothing, first), (found, second) = ranks.run(2, _means, {"pipeline": 2})
    assert not nothing
    expected = {f"2.{name}": buffer for name, buffer in model.means.named_buffers()}
    assert_same(found, {name: expected[name] for name in ("2.running_mean", "2.running_var")})
    gradient = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_same(merged([first, second]), gradient)


def test_running_means_are_those_of_all_data_ranks(ranks: Ranks) -> None:
    halves = [dict(_in_parts(rows).means.named_buffers()) for rows in (slice(8), slice(8, None))]
    expected = (halves[0]["running_mean"] + halves[1]["running_mean"]) / 2
    found = ranks.run(4, _means, {"pipeline": 2, "replicate": 2})
    for rank in (1, 3):
        torch.testing.assert_close(found[rank][0]["2.running_mean"], expected, rtol=1e-12, atol=0)


def _frozen() -> dict[str, Tensor]:
    model = PIPELINE_MODELS["untied"]()
    for unit in model.units()[:3]:
        unit.requires_grad_(False)
    parts = pipeline(model, {"pipeline": 2}, cuts=(3,))
    parts.backward(*batch_for(model, rows=ROWS))
    return gradients(parts)


def test_a_stage_may_have_nothing_to_learn(ranks: Ranks) -> None:
    _, expected = plain_pipeline("untied")
    first, second = ranks.run(2, _frozen)
    assert not first
    assert_same(second, {n: expected[n] for n in second})
    assert "blocks.1.up.weight" in second
