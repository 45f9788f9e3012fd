"""What is computed again comes out as it was, and is not kept meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from atoll.errors import ConfigError
from atoll.plan.tracking import Tracking
from atoll.strategies.inner.unit_transforms import apply_compile, apply_recompute
from tests.island.pool import Ranks
from tests.island.reference import assert_same, batch_for, gpt, spread

WORDS = ["full", "matmul", "every:1", "every:2"]


def _trained(word: str, *, compiled: bool = False) -> tuple[dict[str, Tensor], int, int]:
    """Return gradients of a model with dropout, the bytes kept for backward, and all products."""
    model = gpt(dropout=0.3)
    inputs, targets = batch_for(model)
    names = list(model.state_dict())
    apply_recompute(model.units(), word)
    if compiled:
        apply_compile(model.units(), backend="eager")
    assert list(model.state_dict()) == names
    torch.manual_seed(9)
    with FlopCounterMode(display=False) as counter:
        with Tracking(model.parameters()) as tracking:
            loss = model.loss(inputs, targets)
            kept = tracking.alive_bytes
        loss.backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found, kept, counter.get_total_flops()


@pytest.mark.parametrize("word", WORDS)
def test_gradients_are_the_same_bit_for_bit(word: str) -> None:
    expected, found = _trained("none")[0], _trained(word)[0]
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def test_less_is_kept_the_more_is_computed_again() -> None:
    _, everything, work = _trained("none")
    _, some, more_work = _trained("every:2")
    _, least, most_work = _trained("full")
    assert everything > some > least
    assert work < more_work < most_work
    # Backward is twice forward: once more makes four thirds, less what is not in blocks.
    assert 1.2 < most_work / work <= 4 / 3


def test_matrix_products_can_be_kept() -> None:
    _, everything, work = _trained("none")
    _, least, _ = _trained("full")
    _, kept, same_work = _trained("matmul")
    assert same_work == work
    assert least < kept < everything


@pytest.mark.parametrize("word", ["some", "every:", "every:0", "every:two", ""])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="every:N"):
        apply_recompute([nn.Linear(2, 2)], word)


def test_single_layers_are_left_alone() -> None:
    layers = [nn.Linear(2, 2), nn.GELU(), nn.Sequential(nn.Linear(2, 2), nn.GELU())]
    before: list[Any] = [layer.forward for layer in layers]
    apply_recompute(layers, "full")
    assert [layer.forward == old for layer, old in zip(layers, before, strict=True)] == [
        True, True, False,
    ]  # fmt: skip


def test_sharded_units_draw_the_same_dropout_again(ranks: Ranks) -> None:
    plain = ranks.run(2, spread, "dropout", {"shard": 2}, {})
    again = ranks.run(2, spread, "dropout", {"shard": 2}, {"recompute": "full"})
    for (_, expected, _), (_, found, _) in zip(plain, again, strict=True):
        assert_same(found, expected, within=0.0)


def test_compiled_units_compute_the_same() -> None:
    expected, found = _trained("none")[0], _trained("none", compiled=True)[0]
    assert_same(found, expected)
