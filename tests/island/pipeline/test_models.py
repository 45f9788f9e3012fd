"""Every model of the table in stages; what a rank does not hold is let go."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from atoll.models import MODELS
from tests.island.pipeline.kit import merged, pipeline
from tests.island.pool import Ranks
from tests.island.reference import assert_same, batch_for, gpt, gradients, plain
from tests.models.test_contract import small, some_batch, stirred

WORDS = [
    {"schedule": "1f1b", "microbatches": 2},
    {"schedule": "interleaved", "chunks": 2, "microbatches": 2},
]


def _batch(name: str) -> tuple[Tensor, Tensor]:
    inputs, targets = some_batch(name, rows=4)
    return (inputs.double() if inputs.is_floating_point() else inputs), targets


def _stepped(models: list[str]) -> list[tuple[float, float, dict[str, Tensor]]]:
    found = []
    for name in models:
        for words in WORDS:
            parts = pipeline(stirred(small(name)).double(), {"pipeline": 2}, **words)
            value = parts.loss(*_batch(name)).item()
            loss = parts.backward(*_batch(name)).item()
            found.append((value, loss, gradients(parts)))
    return found


def test_every_model_of_the_table_can_be_cut(ranks: Ranks) -> None:
    names = sorted(MODELS)
    found = ranks.run(2, _stepped, names)
    for name in names:
        model = stirred(small(name)).double()
        loss = model.loss(*_batch(name))
        loss.backward()
        expected = {key: p.grad for key, p in model.named_parameters()}
        for _ in WORDS:
            (value, first, some), (other, second, others) = (one.pop(0) for one in found)
            assert value == pytest.approx(loss.item(), rel=1e-12), name
            assert (other, second) == (value, first)
            assert first == pytest.approx(loss.item(), rel=1e-12), name
            assert_same(merged([some, others]), expected)


def _left(axes: dict[str, int]) -> list[str]:
    """Return which parameters of the whole model are in memory though this rank does not use it."""
    model = gpt()
    held = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    parts = pipeline(model, axes)
    elsewhere = [name for name in held if name not in parts.parameters()]
    assert elsewhere
    del model
    gc.collect()
    return [name for name in elsewhere if held[name]() is not None]


@pytest.mark.parametrize("axes", [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}])
@pytest.mark.every(2)
def test_what_is_on_other_ranks_is_let_go(ranks: Ranks, axes: dict[str, int]) -> None:
    for left in ranks.run(2 * axes.get("tensor", 1), _left, axes):
        assert left == []


def _compiled() -> dict[str, Tensor]:
    quick = partial(torch.compile, backend="eager")  # the same graphs, without a C++ compiler
    with patch.object(torch, "compile", lambda forward, **_: quick(forward)):
        parts = pipeline(gpt(), {"pipeline": 2}, compile=True, recompute="every:2")
    parts.backward(*batch_for(gpt()))
    return gradients(parts)


@pytest.mark.long("tests/train/test_compiled.py::test_two_members_end_as_without_compiling")
def test_stages_may_be_compiled(ranks: Ranks) -> None:
    _, expected = plain("gpt")
    assert_same(merged(ranks.run(2, _compiled)), expected)
