"""Whole models on several ranks: every rank has the gradients of the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from atoll.errors import ConfigError
from atoll.strategies.inner.whole import WholeParts
from tests.island.pool import Ranks
from tests.island.reference import (
    FEATURES,
    assert_same,
    batch_for,
    divided,
    gpt,
    gradients,
    odd,
    perceptron,
    plain,
    spread,
)

dist: Any = torch.distributed


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("gpt", 1, {"accumulate": 4}),
        ("gpt", 2, {}),
        ("gpt", 4, {"accumulate": 2}),
        ("untied", 2, {"accumulate": 4}),
        ("perceptron", 4, {}),
    ],
)
@pytest.mark.every(3)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, count: int, words: dict[str, Any]
) -> None:
    loss, expected = plain(name)
    for found_loss, found, names in ranks.run(count, spread, name, {"replicate": count}, words):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert names == list(expected)
        assert_same(found, expected)


def _single(name: str, words: dict[str, Any]) -> dict[str, Tensor]:
    return spread(name, {}, words, single=True)[1]


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}])
def test_two_ranks_equal_two_parts_on_one_bit_for_bit(ranks: Ranks, axes: dict[str, int]) -> None:
    [expected] = ranks.run(1, _single, "gpt", {"accumulate": 2})
    for _, found, _ in ranks.run(2, spread, "gpt", axes, {}, True):
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            assert gradient.dtype is torch.float32
            assert torch.equal(found[name], gradient), name


def _again() -> list[dict[str, Tensor]]:
    """Return the gradients of three steps on one batch."""
    model = odd()
    batch, parts = batch_for(model), divided(model, {"replicate": 2})
    found = []
    for _ in range(3):
        parts.backward(*batch)
        found.append(gradients(parts))
    return found


def test_frozen_and_unused_parameters_have_no_gradient(ranks: Ranks) -> None:
    _, expected = plain("odd")
    assert set(expected) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for found in ranks.run(2, _again):
        for step in found:
            assert_same(step, expected)


def _counting(seen, bucket):  # type: ignore[no-untyped-def]  # the wrapper dislikes annotations
    seen[-1] += 1
    return allreduce_hook(dist.group.WORLD, bucket)


def _sent(accumulate: int) -> list[int]:
    """Return how many buckets were averaged in each of three steps, none of them large."""
    parts = divided(gpt(), {"replicate": 2}, accumulate=accumulate)
    assert isinstance(parts, WholeParts)
    batch, seen = batch_for(gpt()), [0]
    parts.backward(*batch)
    parts.backward(*batch)  # the wrapper is final from here on
    wrapped: Any = parts._module
    wrapped.register_comm_hook(seen, _counting)
    for _ in range(3):
        seen.append(0)
        parts.backward(*batch)
    return seen[1:]


def test_accumulated_parts_are_averaged_once(ranks: Ranks) -> None:
    [once, _], [often, _] = ranks.run(2, _sent, 1), ranks.run(2, _sent, 4)
    assert often == once
    assert min(once) >= 1


class _Normalised(nn.Sequential):
    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def _normalised(axes: dict[str, int]) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(2)
    model = _Normalised(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    model.register_buffer("constant", torch.full((3,), 0.1, dtype=torch.float64))
    inputs, targets = batch_for(model)
    with torch.no_grad():
        halves = torch.stack([model[0](half).mean(0) for half in inputs.chunk(2)])
    expected = 0.1 * halves.mean(0)
    parts = divided(model, axes)
    parts.train(True)
    parts.backward(inputs, targets)
    return {name: buffer.clone() for name, buffer in parts.buffers().items()}, expected


@pytest.mark.parametrize("axes", [{"replicate": 2}, {"shard": 2}])
def test_running_means_are_those_of_all_ranks(ranks: Ranks, axes: dict[str, int]) -> None:
    (first, expected), (second, _) = ranks.run(2, _normalised, axes)
    assert set(first) == {"1.running_mean", "1.running_var", "constant"}
    for name, buffer in first.items():
        assert torch.equal(buffer, second[name])
    torch.testing.assert_close(first["1.running_mean"], expected)
    assert torch.equal(first["constant"], torch.full((3,), 0.1, dtype=torch.float64))


class _Turned(nn.Module):
    """Adds up the means of its inputs in a complex buffer."""

    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex128))

    def forward(self, inputs: Tensor) -> Tensor:
        self.phase += torch.complex(inputs.mean(), -inputs.mean())
        return inputs


def _turned() -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    model = _Normalised(_Turned(), nn.Linear(FEATURES, 2)).double()
    model.register_buffer("scale", torch.ones(2))
    inputs, targets = batch_for(model)
    parts = divided(model, {"replicate": 2})
    parts.train(True)
    parts.backward(inputs, targets)
    return dict(parts.buffers()), dict(parts.untrained()), inputs.mean()


def test_complex_buffers_are_averaged_as_real_ones_are(ranks: Ranks) -> None:
    for buffers, untrained, mean in ranks.run(2, _turned):
        assert buffers.keys() == {"0.phase", "scale"}
        assert not untrained
        torch.testing.assert_close(buffers["0.phase"], torch.complex(mean, -mean).view(1))


def _without_criterion() -> str:
    with pytest.raises(ConfigError) as caught:
        divided(nn.Sequential(nn.Linear(2, 2)), {"replicate": 2})
    return str(caught.value)


def test_a_model_that_has_no_loss_is_refused(ranks: Ranks) -> None:
    for told in ranks.run(2, _without_criterion):
        assert "criterion(outputs, targets)" in told


def _evaluated(axes: dict[str, int], rows: int, accumulate: int) -> float:
    model = perceptron()
    parts = divided(model, axes, accumulate=accumulate)
    parts.train(False)
    return float(parts.loss(*batch_for(model, rows=rows)))


@pytest.mark.parametrize("axes", [{"replicate": 4}, {"shard": 4}, {"replicate": 2, "shard": 2}])
@pytest.mark.parametrize(("rows", "accumulate"), [(1, 1), (3, 2), (7, 1), (13, 3), (16, 2)])
@pytest.mark.every(4)
def test_the_loss_of_any_number_of_rows_is_their_mean(
    ranks: Ranks, axes: dict[str, int], rows: int, accumulate: int
) -> None:
    with torch.no_grad():
        expected = float(perceptron().loss(*batch_for(perceptron(), rows=rows)))
    found = ranks.run(4, _evaluated, axes, rows, accumulate)
    assert found == pytest.approx([expected] * 4, rel=1e-12)
