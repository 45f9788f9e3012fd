"""Losses and figures of updates, against loops over numpy doubles."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.rl.algorithms import losses


def numbers(count: int = 40, *, seed: int = 1) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("clip", [0.1, 0.2, 10.0])
def test_clipped_loss_and_gradient_are_pessimistic(clip: float) -> None:
    log_ratios, advantages = (0.3 * numbers()).requires_grad_(), numbers(seed=2)
    found = losses.clipped_policy_loss(log_ratios, advantages, clip=clip)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert log_ratios.grad is not None
    found = found.detach()
    pairs = zip(log_ratios.tolist(), advantages.tolist(), strict=True)
    for i, (log_ratio, advantage) in enumerate(pairs):
        ratio = math.exp(log_ratio)
        gain = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        beyond = ratio > 1 + clip if advantage > 0 else ratio < 1 - clip
        assert float(found[i]) == pytest.approx(-gain, abs=1e-12)
        slope = 0.0 if beyond else -advantage * ratio
        assert float(log_ratios.grad[i]) == pytest.approx(slope, abs=1e-12)


def test_the_policy_gradient_does_not_flow_into_advantages() -> None:
    log_probabilities, advantages = numbers().requires_grad_(), numbers(seed=2).requires_grad_()
    losses.policy_gradient_loss(log_probabilities, advantages).sum().backward()  # type: ignore[no-untyped-call]
    assert advantages.grad is None
    assert log_probabilities.grad is not None
    torch.testing.assert_close(log_probabilities.grad, -advantages.detach())


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_a_value_that_moved_too_far_gains_nothing_by_it(clip: float) -> None:
    values, targets, before = numbers(), numbers(seed=2), numbers(seed=3)
    found = losses.value_loss(values, targets, before=before, clip=clip)
    for i in range(len(values)):
        value, target, old = float(values[i]), float(targets[i]), float(before[i])
        wanted = (value - target) ** 2
        if clip:
            near = old + min(max(value - old, -clip), clip)
            wanted = max(wanted, (near - target) ** 2)
        assert float(found[i]) == pytest.approx(wanted / 2, abs=1e-12)


def test_the_divergence_is_unbiased_and_never_negative() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.2, 0.4]).double()
    each = losses.approximate_divergence((new / old).log())
    assert (each >= 0).all()
    exact = float((old * (old / new).log()).sum())
    assert float((old * each).sum()) == pytest.approx(exact, abs=1e-12)
    assert float(losses.approximate_divergence(torch.zeros(3)).sum()) == 0.0


def test_the_clipped_share_counts_both_sides() -> None:
    log_ratios = torch.tensor([1.3, 1.1, 0.9, 0.7]).log()
    assert float(losses.clipped_share(log_ratios, clip=0.2)) == 0.5


def test_explained_variance_is_one_minus_what_is_left() -> None:
    targets, values = numbers(), numbers() + 0.5 * numbers(seed=2)
    wanted = 1 - np.var((targets - values).numpy()) / np.var(targets.numpy())
    assert float(losses.explained_variance(values, targets)) == pytest.approx(wanted, abs=1e-12)
    assert float(losses.explained_variance(targets + 3, targets)) == pytest.approx(1.0)
    assert float(losses.explained_variance(values, torch.ones_like(values))) == 0.0


def test_advantages_have_mean_zero_and_deviation_one() -> None:
    found = losses.standardised(100 * numbers() + 7)
    assert float(found.mean()) == pytest.approx(0.0, abs=1e-12)
    assert float(found.std(correction=0)) == pytest.approx(1.0, abs=1e-6)
    assert losses.standardised(torch.full((3,), 2.0)).tolist() == [0.0, 0.0, 0.0]
