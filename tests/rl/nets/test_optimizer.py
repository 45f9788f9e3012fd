"""The optimizer's schedule and its state as tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from atoll.errors import CheckpointCorrupt
from atoll.rl.nets.optimizer import (
    adam,
    annealed,
    limit_gradients,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
)
from atoll.rl.nets.policy import linear


def test_the_rate_falls_in_a_line_and_never_below_zero() -> None:
    rates = [annealed(0.4, done=done, total=100, anneal=True) for done in (0, 25, 100, 130)]
    assert rates == pytest.approx([0.4, 0.3, 0.0, 0.0])
    assert annealed(0.4, done=90, total=100, anneal=False) == 0.4
    assert annealed(0.4, done=90, total=0, anneal=True) == 0.4


@pytest.mark.parametrize("size", [0.01, 3.0])
def test_gradients_are_limited_as_torch_limits_them(size: float) -> None:
    one, other = (
        linear(3, 2, gain=size, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    for layer in (one, other):
        layer(torch.ones(1, 3)).square().sum().backward()
    limit_gradients(one.parameters(), max_norm=0.5)
    before = nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    assert (float(before) > 0.5) == (size > 1)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad)


def stepped(layer: nn.Linear, count: int) -> torch.optim.Optimizer:
    optimizer = adam(layer.parameters(), lr=0.1)
    step(layer, optimizer, count)
    return optimizer


def step(layer: nn.Linear, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        layer(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()


def test_a_loaded_state_goes_on_bit_for_bit() -> None:
    layer, copy = (
        linear(3, 2, gain=1.0, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    optimizer = stepped(layer, 3)
    copy.load_state_dict(layer.state_dict())
    saved = optimizer_tensors(optimizer)
    assert set(saved) == {f"{n}.{k}" for n in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")}
    other = adam(copy.parameters(), lr=0.1)
    load_optimizer_tensors(other, saved)
    for each, its in ((layer, optimizer), (copy, other)):
        set_rate(its, 0.05)
        step(each, its, 2)
    assert torch.equal(layer.weight, copy.weight)


def test_a_state_of_other_parameters_is_refused() -> None:
    narrow, wide = (linear(n, 2, gain=1.0, generator=torch.Generator()) for n in (3, 4))
    saved = optimizer_tensors(stepped(narrow, 1))
    with pytest.raises(CheckpointCorrupt, match=r"0\.exp_avg of shape \(2, 3\)"):
        load_optimizer_tensors(adam(wide.parameters(), lr=0.1), saved)
