"""Models cut over ranks: gradients of the whole batch, a part of everything on each rank."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.island.pool import Ranks
from tests.island.reference import (
    assert_same,
    batch_for,
    divided,
    gpt,
    gradients,
    odd,
    plain,
    spread,
)


@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("gpt", 2, {}),
        ("gpt", 4, {"accumulate": 2}),
        ("gpt", 2, {"accumulate": 4, "reshard": False}),
        ("untied", 4, {"reshard": False}),
        ("untied", 2, {"accumulate": 2, "recompute": "full"}),
        ("perceptron", 4, {"accumulate": 2}),
    ],
)
@pytest.mark.every(4)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, count: int, words: dict[str, Any]
) -> None:
    loss, expected = plain(name)
    for found_loss, found, names in ranks.run(count, spread, name, {"shard": count}, words):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert names == list(expected)
        assert_same(found, expected)


def _odd() -> tuple[dict[str, Tensor], set[str]]:
    model = odd()
    parts, batch = divided(model, {"shard": 2}, accumulate=2), batch_for(model)
    for _ in range(2):
        parts.backward(*batch)
    return gradients(parts), set(parts.parameters())


def test_frozen_and_unused_parameters_do_no_harm(ranks: Ranks) -> None:
    _, expected = plain("odd")
    for found, names in ranks.run(2, _odd):
        assert names == {*expected, "unused"}
        found.pop("unused", None)
        assert_same(found, expected)


def _layout(tie: bool) -> tuple[int, int, list[str], int]:
    """Return own and all numbers, the modules that are gathered on their own, and their units."""
    model = gpt(tie=tie)
    total = sum(p.numel() for p in model.parameters())
    parts = divided(model, {"shard": 2})
    own = 0
    for parameter in parts.parameters().values():
        assert isinstance(parameter, DTensor)
        own += parameter.to_local().numel()
    gathered = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return own, total, gathered, len(model.units())


@pytest.mark.parametrize("tie", [True, False])
def test_each_rank_holds_its_part_and_gathers_unit_by_unit(ranks: Ranks, tie: bool) -> None:
    blocks = [f"blocks.{number}" for number in range(3)]
    expected = ["", *blocks] if tie else ["", "embedding", *blocks, "head"]
    (first, total, gathered, units), (second, *others) = ranks.run(2, _layout, tie)
    assert gathered == expected
    assert others == [total, gathered, units]
    assert units == 7  # dropout and the last norm are not worth messages of their own
    assert first + second == total


def _after_a_look(reshard: bool) -> tuple[float, float, float]:
    """Return losses before and after the shards were changed, and after a step on the change."""
    model = gpt()
    batch, parts = batch_for(model), divided(model, {"shard": 2}, reshard=reshard)
    before = float(parts.loss(*batch))
    with torch.no_grad():
        for parameter in parts.parameters().values():
            assert isinstance(parameter, DTensor)
            parameter.to_local().mul_(0.5)
    return before, float(parts.loss(*batch)), float(parts.backward(*batch))


@pytest.mark.parametrize("reshard", [True, False])
def test_what_a_look_gathers_does_not_outlive_a_change(ranks: Ranks, reshard: bool) -> None:
    model = gpt()
    batch = batch_for(model)
    with torch.no_grad():
        expected = [model.loss(*batch).item()]
        for parameter in model.parameters():
            parameter.mul_(0.5)
        expected += [model.loss(*batch).item()] * 2
    for found in ranks.run(2, _after_a_look, reshard):
        assert found == pytest.approx(tuple(expected), rel=1e-12)


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _offloaded() -> tuple[list[str], dict[str, Tensor]]:
    heard, logger = _Heard(), logging.getLogger("atoll.strategies.inner.shard")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    model = gpt()
    parts = divided(model, {"shard": 2}, offload=True)
    logger.removeHandler(heard)
    parts.backward(*batch_for(model))
    return heard.lines, gradients(parts)


def test_offload_without_accelerators_logs_that_it_is_ignored(ranks: Ranks) -> None:
    _, expected = plain("gpt")
    for lines, found in ranks.run(2, _offloaded):
        assert len(lines) == 1
        assert "changes nothing" in lines[0]
        assert_same(found, expected)


class _Listed(nn.Module):
    """A user's own model: a list of layers, and more beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        found: Tensor = self.last(hidden)
        return found

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets)


def _listed() -> _Listed:
    torch.manual_seed(4)
    return _Listed().double()


def _gathered_listed() -> tuple[list[str], dict[str, Tensor]]:
    model = _listed()
    parts = divided(model, {"shard": 2}, recompute="every:2")
    parts.backward(*batch_for(model))
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return names, gradients(parts)


def test_a_list_of_layers_is_gathered_layer_by_layer(ranks: Ranks) -> None:
    model = _listed()
    inputs, targets = batch_for(model)
    model.criterion(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for names, found in ranks.run(2, _gathered_listed):
        assert names == ["", "layers.0", "layers.1", "layers.2"]
        assert_same(found, expected)
