from __future__ import annotations

import pytest
import torch

from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE, Actions
from atoll.rl.nets.distributions import ActionSampler, distribution

OUTPUT = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4])
STEPS, COLUMNS = 200, 500


def drawn(actions: Actions, *, seed: int = 0) -> tuple[ActionSampler, torch.Tensor]:
    """Draw many times from what one output means."""
    width = sum(actions.sizes)
    log_deviation = torch.tensor([0.5, -0.5]) if actions.kind == CONTINUOUS else None
    sampler = ActionSampler(
        actions, log_deviation, length=STEPS, columns=COLUMNS,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    output = OUTPUT[:width].expand(COLUMNS, width)
    return sampler, torch.stack([sampler.choose(step, output) for step in range(STEPS)])


def test_choices_come_as_often_as_their_probabilities_say() -> None:
    _, actions = drawn(Actions(kind=DISCRETE, sizes=(3,)))
    assert actions.shape == (STEPS, COLUMNS, 1)
    often = torch.bincount(actions.flatten(), minlength=3) / actions.numel()
    assert torch.allclose(often, OUTPUT[:3].softmax(0), atol=0.006)  # four deviations


def test_several_choices_are_drawn_each_from_its_own() -> None:
    _, actions = drawn(Actions(kind=MULTI_DISCRETE, sizes=(3, 2)))
    pairs = torch.bincount((actions[..., 0] * 2 + actions[..., 1]).flatten(), minlength=6)
    right = torch.outer(OUTPUT[:3].softmax(0), OUTPUT[3:].softmax(0)).flatten()
    assert torch.allclose(pairs / pairs.sum(), right, atol=0.006)


def test_numbers_are_drawn_with_their_mean_and_deviation() -> None:
    _, actions = drawn(Actions(kind=CONTINUOUS, sizes=(2,)))
    flat = actions.reshape(-1, 2)
    assert torch.allclose(flat.mean(0), OUTPUT[:2], atol=0.025)
    assert torch.allclose(flat.std(0), torch.tensor([0.5, -0.5]).exp(), rtol=0.01)


@pytest.mark.parametrize(
    "actions",
    [
        Actions(kind=DISCRETE, sizes=(3,)),
        Actions(kind=MULTI_DISCRETE, sizes=(3, 2)),
        Actions(kind=CONTINUOUS, sizes=(2,)),
    ],
)
def test_probabilities_match_the_sampled_distribution(actions: Actions) -> None:
    sampler, chosen = drawn(actions)
    log_deviation = torch.tensor([0.5, -0.5]) if actions.kind == CONTINUOUS else None
    one = distribution(actions, OUTPUT[: sum(actions.sizes)], log_deviation)
    right = torch.stack([one.log_probability(row) for row in chosen[0]])
    assert torch.allclose(sampler.log_probabilities(chosen)[0], right)
    assert torch.equal(chosen, drawn(actions)[1])
    assert not torch.equal(chosen, drawn(actions, seed=1)[1])
