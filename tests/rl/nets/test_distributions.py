"""Distributions against torch's own, closed forms and the share of their draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, distributions

from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE
from atoll.rl.nets.distributions import (
    Categorical,
    Distribution,
    Gaussian,
    MultiCategorical,
    distribution,
    outputs,
)
from tests.rl.walks import SPACES

KINDS = [DISCRETE, MULTI_DISCRETE, CONTINUOUS]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def made(kind: str, *, states: int = 5) -> Distribution:
    """Return a distribution in doubles for each of several states."""
    output = torch.randn(states, outputs(SPACES[kind]), generator=generator(), dtype=torch.float64)
    deviation = torch.tensor([-0.3, 0.4], dtype=torch.float64)
    return distribution(SPACES[kind], output, deviation if kind == CONTINUOUS else None)


def torchs(found: Distribution) -> distributions.Distribution:
    """Return torch's distribution with the same parameters, of one choice or of numbers."""
    if isinstance(found, Categorical):
        return distributions.Categorical(logits=found.log_p)
    assert isinstance(found, Gaussian)
    normal = distributions.Normal(found.mean, found.log_deviation.exp().expand_as(found.mean))
    return distributions.Independent(normal, 1)


@pytest.mark.parametrize("kind", [DISCRETE, CONTINUOUS])
def test_probabilities_and_entropy_are_torchs(kind: str) -> None:
    found = made(kind)
    reference = torchs(found)
    actions = found.sample(generator())
    plain = actions.squeeze(-1) if kind == DISCRETE else actions
    torch.testing.assert_close(found.log_probability(actions), reference.log_prob(plain))
    torch.testing.assert_close(found.entropy(), reference.entropy())


def test_several_choices_are_the_product_of_each() -> None:
    found = made(MULTI_DISCRETE)
    assert isinstance(found, MultiCategorical)
    actions = found.sample(generator())
    assert actions.shape == (5, 2)
    each = [torchs(part) for part in found.parts]
    together = sum(part.log_prob(actions[:, i]) for i, part in enumerate(each))
    assert isinstance(together, Tensor)
    torch.testing.assert_close(found.log_probability(actions), together)
    entropies = each[0].entropy() + each[1].entropy()
    torch.testing.assert_close(found.entropy(), entropies)


@pytest.mark.parametrize("kind", [DISCRETE, MULTI_DISCRETE])
def test_draws_have_the_shares_of_their_probabilities(kind: str) -> None:
    count = 40_000
    output = torch.randn(outputs(SPACES[kind]), generator=generator())
    found = distribution(SPACES[kind], output.expand(count, -1), None)
    actions = found.sample(generator())
    for choice in range(3):
        action = torch.full((count, 1), choice) if kind == DISCRETE else torch.tensor([[choice, 1]])
        probability = float(
            found.log_probability(action.expand(count, SPACES[kind].width))[0].exp()
        )
        share = float((actions == action).all(-1).float().mean())
        assert share == pytest.approx(probability, abs=4 * math.sqrt(0.25 / count))


def test_draws_of_a_gaussian_have_its_mean_and_deviation() -> None:
    mean, log_deviation = torch.tensor([1.0, -2.0]), torch.tensor([0.5, -1.0])
    drawn = Gaussian(mean.expand(40_000, 2), log_deviation).sample(generator())
    torch.testing.assert_close(drawn.mean(0), mean, atol=0.03, rtol=0)
    torch.testing.assert_close(drawn.std(0), log_deviation.exp(), atol=0.03, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_generator_repeats_draws_and_mode_is_likeliest(kind: str) -> None:
    found = made(kind)
    first = found.sample(generator())
    assert torch.equal(first, found.sample(generator()))
    assert not torch.equal(first, found.sample(torch.Generator().manual_seed(4)))
    assert first.shape == found.mode().shape == (5, SPACES[kind].width)
    best = found.log_probability(found.mode())
    for seed in range(20):
        drawn = found.sample(torch.Generator().manual_seed(seed))
        assert (found.log_probability(drawn) <= best + 1e-12).all()


def test_a_choice_without_any_chance_adds_nothing_to_entropy() -> None:
    found = Categorical(torch.tensor([[0.0, -math.inf, 0.0]]))
    assert float(found.entropy()) == pytest.approx(math.log(2))


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_have_gradients_that_differences_confirm(kind: str) -> None:
    output = torch.randn(
        3, outputs(SPACES[kind]), generator=generator(), dtype=torch.float64, requires_grad=True
    )
    deviation = torch.tensor([0.1, -0.2], dtype=torch.float64, requires_grad=True)
    actions = made(kind, states=3).sample(generator())

    def density(output: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
        found = distribution(SPACES[kind], output, deviation if kind == CONTINUOUS else None)
        return found.log_probability(actions), found.entropy() + 0 * output.sum()

    assert torch.autograd.gradcheck(density, (output, deviation))
