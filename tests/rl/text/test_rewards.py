"""Rewards, the divergence from the reference, and advantages of tokens and of groups."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError, DataError
from atoll.rl.text import learner
from atoll.rl.text.rewards import group_advantages, rewards_per_step, scores, token_advantages
from atoll.rl.text.sampler import write
from atoll.rl.text.tasks import Brackets
from tests.rl.text.small import WORDING, episodes, gpt


def two_distributions(apart: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ours = torch.randn(50, generator=generator, dtype=torch.float64)
    reference = ours + apart * torch.randn(50, generator=generator, dtype=torch.float64)
    return ours.log_softmax(0), reference.log_softmax(0)


@pytest.mark.parametrize("apart", [0.01, 0.3, 2.0])
def test_divergence_estimates_are_unbiased(
    apart: float,
) -> None:
    ours, reference = two_distributions(apart)
    exact = (ours.exp() * (ours - reference)).sum()
    ratios = reference - ours
    for estimate in (learner.plain, learner.positive):
        torch.testing.assert_close((ours.exp() * estimate(ratios)).sum(), exact, rtol=1e-10, atol=0)
    assert (learner.positive(ratios) >= 0).all()
    assert (learner.half_square(ratios) >= 0).all()
    spread = (ours.exp() * (learner.positive(ratios) - exact).square()).sum()
    plain = (ours.exp() * (learner.plain(ratios) - exact).square()).sum()
    if apart < 1:
        assert spread < plain


def test_the_half_square_comes_close_where_the_two_are_close() -> None:
    errors = []
    for apart in (0.1, 0.01):
        ours, reference = two_distributions(apart)
        exact = (ours.exp() * (ours - reference)).sum()
        errors.append(
            abs(float((ours.exp() * learner.half_square(reference - ours)).sum() / exact) - 1)
        )
    assert errors[0] < 0.2
    assert errors[1] < errors[0] / 5


def test_penalty_gradient_pulls_to_the_reference() -> None:
    ours, reference = two_distributions(0.5)
    logits = ours.clone().requires_grad_()
    log_p = logits.log_softmax(0)
    (ours.exp() * learner.positive(reference - log_p)).sum().backward()  # type: ignore[no-untyped-call]
    # Of tokens drawn from π the estimate's gradient is that of KL(π_ref || π) in expectation.
    expected = ours.exp() - reference.exp()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, expected, rtol=1e-9, atol=1e-12)


def test_penalties_sum_to_the_divergence() -> None:
    lengths = torch.tensor([2, 3])
    ours, reference = torch.randn(2, 3), torch.randn(2, 3)
    rewards = rewards_per_step(torch.tensor([1.0, 0.5]), lengths, ours, reference, kl=0.1)
    for row, (length, score) in enumerate([(2, 1.0), (3, 0.5)]):
        penalty = -0.1 * (ours - reference)[row, :length]
        expected = penalty.clone()
        expected[-1] += score
        torch.testing.assert_close(rewards[row, :length], expected)
        assert (rewards[row, length:] == 0).all()


def reference_gae(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """The sum of the definition: every λ-weighted temporal difference by itself."""
    found = []
    for start in range(len(rewards)):
        total = 0.0
        for t in range(start, len(rewards)):
            following = values[t + 1] if t + 1 < len(rewards) else 0.0
            total += (gamma * lam) ** (t - start) * (rewards[t] + gamma * following - values[t])
        found.append(total)
    return found


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (1.0, 1.0)])
def test_advantages_of_tokens_end_with_each_completion(gamma: float, lam: float) -> None:
    batch = episodes(gpt(), gpt(7))
    values = torch.randn(batch.rewards.shape, generator=torch.Generator().manual_seed(3))
    advantages, targets = token_advantages(batch, values, gamma=gamma, lam=lam)
    for row, length in enumerate(batch.lengths.tolist()):
        expected = reference_gae(
            batch.rewards[row, :length].double().tolist(), values[row, :length].double().tolist(),
            gamma, lam,
        )  # fmt: skip
        np.testing.assert_allclose(advantages[row, :length], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            targets[row, :length], advantages[row, :length] + values[row, :length]
        )
        assert not advantages[row, length:].any()
        assert not targets[row, length:].any()


def test_what_is_behind_an_end_changes_no_advantage() -> None:
    batch = episodes(gpt(), gpt(7))
    values = torch.randn(batch.rewards.shape)
    before, _ = token_advantages(batch, values, gamma=1.0, lam=0.9)
    after, _ = token_advantages(
        batch, torch.where(batch.mask, values, torch.full_like(values, 1e3)), gamma=1.0, lam=0.9
    )
    assert torch.equal(before, after)


def test_completions_are_compared_within_their_group() -> None:
    found = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 5.0, 5.0, 5.0]), group=4)
    torch.testing.assert_close(found[:4], torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert not found[4:].any()  # all equal: nothing to learn, and no division by nothing


def test_group_advantages_are_standardised() -> None:
    raw = torch.randn(24, generator=torch.Generator().manual_seed(6))
    found = group_advantages(raw, group=6).view(4, 6)
    torch.testing.assert_close(found.mean(1), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(found.std(1, correction=0), torch.ones(4))
    torch.testing.assert_close(group_advantages(100 * raw - 7, group=6).view(4, 6), found,
                               rtol=1e-3, atol=1e-4)  # fmt: skip


@pytest.mark.parametrize(("count", "group"), [(4, 1), (5, 2)])
def test_groups_that_cannot_be_compared_are_refused(count: int, group: int) -> None:
    with pytest.raises(ConfigError, match="whole groups"):
        group_advantages(torch.zeros(count), group=group)


class Poison(Brackets):
    """Sometimes its reward is no number."""

    def reward(self, prompt: str, completion: str) -> float:
        return float("nan")


def test_a_reward_that_is_no_number_names_the_text() -> None:
    task = Poison()
    prompts = WORDING.draw(task, 2, repeats=1, source=random.Random(0), room=16)
    ends = torch.ones(256, dtype=torch.bool)
    written = write(gpt(), prompts, ends=ends, max_tokens=1, temperature=1.0,
                    generator=torch.Generator().manual_seed(0))  # fmt: skip
    written.tokens[:, -1] = 0
    for row, length in enumerate(prompts.lengths.tolist()):
        written.tokens[row, length] = ord("\n")
    with pytest.raises(DataError, match="nan for"):
        scores(task, prompts, written, WORDING)
