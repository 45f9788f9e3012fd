"""A3C: one gradient per stretch, with own values or somebody else's."""

from __future__ import annotations

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import DataError
from atoll.group.single import SingleGroup
from atoll.rl.algorithms.a3c import A3c
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE
from atoll.rl.trajectory import ValuedTrajectory
from atoll.run import Run
from atoll.run.place import Membership
from tests.rl.walks import task_of, valued, walk

SMALL = RlTable(
    algorithm="a3c", critic="own", hidden=[8], critic_hidden=[8], lr=0.01, critic_lr=0.02,
    entropy=0.01,
)  # fmt: skip


def made(kind: str = DISCRETE, *, seed: int = 1, **changes: Any) -> A3c:
    rl = dataclasses.replace(SMALL, **changes)
    return A3c(task_of(kind), rl, total_steps=1000, seed=seed)


def weights(a3c: A3c) -> Tensor:
    state = a3c.state_dict()
    return torch.cat([state[key].flatten().double() for key in sorted(state)])


def updates(a3c: A3c, count: int, *, start: int = 0) -> None:
    for number in range(start, start + count):
        trajectory = walk(a3c.policy, seed=number)
        a3c.improve(trajectory, valued(trajectory, seed=number))


@pytest.mark.parametrize("critic", ["own", "pooled"])
@pytest.mark.parametrize("kind", [DISCRETE, CONTINUOUS])
def test_the_step_is_down_the_n_step_gradient(kind: str, critic: str) -> None:
    a3c = made(kind, critic=critic, max_norm=1e9, normalise=False)
    before = copy.deepcopy(a3c.policy)
    trajectory = walk(a3c.policy, length=5, columns=3)
    values = valued(trajectory)
    if a3c.model.value is not None:
        with torch.no_grad():
            unit = 1 / (1 - 0.97)  # what a reward of one at every step is worth
            seen, cut = trajectory.observations, trajectory.cut_observations
            values = ValuedTrajectory(
                unit * a3c.model.value(seen).squeeze(-1),
                unit * a3c.model.value(cut).squeeze(-1), 0,
            )  # fmt: skip
    a3c.optimizer = torch.optim.SGD(a3c.model.parameters(), lr=1.0)
    a3c.improve(trajectory, values)

    # Returns of as many steps as the stretch has, by hand.
    following = trajectory.with_values(values.values, values.cut_values).next_values
    returns = torch.zeros(5, 3)
    for column in range(3):
        later = 0.0
        for step in reversed(range(5)):
            if step == 4 or trajectory.ended[step, column]:
                later = float(following[step, column] * ~trajectory.terminated[step, column])
            later = float(trajectory.rewards[step, column]) + 0.97 * later
            returns[step, column] = later
    better = returns - values.values[:-1]
    better = (better - better.mean()) / better.std(correction=0)
    log_probabilities, entropy = before.evaluate(trajectory)
    loss = -(better * log_probabilities).mean() - 0.01 * entropy.mean()
    loss.backward()  # type: ignore[no-untyped-call]
    pairs = zip(a3c.policy.named_parameters(), before.parameters(), strict=True)
    for (name, now), then in pairs:
        assert then.grad is not None
        wanted = then - SMALL.lr * then.grad
        torch.testing.assert_close(now, wanted, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("critic", ["own", "pooled"])
@pytest.mark.parametrize("outer", ["async-sgd", "local-sgd"])
def test_an_outer_strategy_carries_the_steps(outer: str, critic: str, tmp_path: Path) -> None:
    plain, carried = made(critic=critic), made(critic=critic)
    run = Run(SingleGroup(), Membership(tmp_path, seed=1))
    carried.optimizer = run.wrap(carried.module, carried.optimizer, outer=outer)
    updates(plain, 5)
    updates(carried, 5)
    run.finish()
    for mine, theirs in zip(plain.module.parameters(), carried.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_own_values_learn_and_pooled_ones_are_not_even_there() -> None:
    pooled = made(critic="pooled")
    assert pooled.model.value is None
    assert len(list(pooled.module.parameters())) == len(list(pooled.policy.parameters()))
    own = made(lr=0.0, critic_lr=0.0)
    own.rl = dataclasses.replace(own.rl, lr=1e-9, critic_lr=0.05, anneal=False)
    trajectory = walk(own.policy, length=16)
    trajectory.terminated[:] = True  # so that the value of each state is its reward
    trajectory.rewards = trajectory.observations[:-1, :, 0].clone()
    stats = [own.improve(trajectory) for _ in range(120)]
    assert stats[-1]["value_loss"] < 0.1 * stats[0]["value_loss"]
    assert stats[-1]["explained_variance"] > 0.8


@pytest.mark.parametrize("critic", ["own", "pooled"])
def test_a_seed_repeats_every_bit_and_a_saved_state_goes_on(critic: str) -> None:
    whole, same, first = (made(critic=critic) for _ in range(3))
    updates(whole, 4)
    updates(same, 4)
    assert torch.equal(weights(whole), weights(same))
    updates(first, 2)
    second = made(critic=critic, seed=8)
    second.load_state_dict(first.state_dict())
    updates(second, 2, start=2)
    assert torch.equal(weights(whole), weights(second))


def test_better_actions_become_more_likely() -> None:
    a3c = made(lr=0.02, critic_lr=0.002, anneal=False)
    for seed in range(30):
        trajectory = walk(a3c.policy, seed=seed, length=8, ends=False)
        trajectory.terminated[:] = True  # what an action brings, it brings at once
        trajectory.rewards = (trajectory.actions[..., 0] == 2).float()
        a3c.improve(trajectory)
    assert float((trajectory.actions[..., 0] == 2).float().mean()) > 0.7


def test_large_rewards_do_not_drown_the_policys_gradient() -> None:
    small, large = made(max_norm=0.5), made(max_norm=0.5)
    for a3c, size in ((small, 1.0), (large, 1e4)):
        a3c.optimizer = torch.optim.SGD(a3c.model.parameters(), lr=1.0)
        trajectory = walk(a3c.policy)
        trajectory.rewards *= size
        with torch.no_grad():
            assert a3c.model.value is not None
            for parameter in a3c.model.value.parameters():
                parameter.zero_()
        a3c.improve(trajectory)
    for mine, theirs in zip(small.policy.parameters(), large.policy.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_both_learning_rates_fall_together() -> None:
    a3c = made()
    a3c.total_steps = 48
    updates(a3c, 1)
    updates(a3c, 1)
    assert [group["lr"] for group in a3c.optimizer.param_groups] == pytest.approx([0.005, 0.01])


def test_non_finite_reward_is_named_without_effect() -> None:
    a3c = made()
    before = weights(a3c)
    trajectory = walk(a3c.policy, ends=False)
    trajectory.rewards[2, 1] = math.inf
    with pytest.raises(DataError, match="policy p, step 2, column 1"):
        a3c.improve(trajectory)
    assert torch.equal(weights(a3c), before)
