"""The network of a policy: what it does is what it says that it did."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from atoll.config.rl_tables import RlTable
from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE
from atoll.rl.nets.distributions import distribution, outputs
from atoll.rl.nets.policy import Policy, RunningNorm
from tests.rl.walks import SPACES, task_of, walk

KINDS = [DISCRETE, MULTI_DISCRETE, CONTINUOUS]


def made(kind: str = DISCRETE, *, recurrent: int = 0, norm: bool = False, seed: int = 1) -> Policy:
    """Return a small policy; a head of ordinary size, so that states matter."""
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(
        task_of(kind), hidden=(8, 8), recurrent=recurrent,
        norm=RunningNorm((4,)) if norm else None, generator=generator,
    )  # fmt: skip
    with torch.no_grad():
        policy.head.weight.mul_(50.0)
    return policy


@pytest.mark.parametrize("recurrent", [0, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_evaluating_gives_the_probabilities_of_acting(kind: str, recurrent: int) -> None:
    policy = made(kind, recurrent=recurrent, norm=True)
    assert policy.norm is not None
    policy.norm.update(3 * torch.randn(50, 4, generator=torch.Generator().manual_seed(2)) + 1)
    trajectory = walk(policy, length=9, columns=5)
    log_probabilities, entropy = policy.evaluate(trajectory)
    assert log_probabilities.shape == entropy.shape == (9, 5)
    torch.testing.assert_close(
        log_probabilities, trajectory.log_probabilities, atol=1e-5, rtol=1e-5
    )
    assert log_probabilities.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_policy_is_nearly_uniform(kind: str) -> None:
    policy = Policy(task_of(kind), generator=torch.Generator().manual_seed(1))
    _, entropy = policy.evaluate(walk(policy))
    free = distribution(
        SPACES[kind], torch.zeros(1, outputs(SPACES[kind])), policy.log_deviation
    ).entropy()
    torch.testing.assert_close(entropy, free.expand_as(entropy), atol=1e-3, rtol=0)


def test_building_and_acting_leave_torchs_own_generator_alone() -> None:
    before = torch.get_rng_state()
    policy = made(recurrent=4)
    walk(policy)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_repeats_weights_and_draws() -> None:
    one, same, other = made(), made(), made(seed=2)
    for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)
    assert torch.equal(walk(one).actions, walk(same).actions)


def test_a_recurrent_policy_forgets_where_an_episode_ended() -> None:
    policy = made(recurrent=6)
    trajectory = walk(policy, length=8, columns=2, ends=False)
    trajectory.terminated[3, 0] = True
    whole, _ = policy.evaluate(trajectory)
    # The second half of the first column alone, from no memory; of the other one it goes on.
    tail = dataclasses.replace(
        trajectory,
        observations=trajectory.observations[4:], actions=trajectory.actions[4:],
        log_probabilities=trajectory.log_probabilities[4:], rewards=trajectory.rewards[4:],
        terminated=trajectory.terminated[4:], truncated=trajectory.truncated[4:],
        hidden=policy.initial(2),
    )  # fmt: skip
    fresh, _ = policy.evaluate(tail)
    torch.testing.assert_close(whole[4:, 0], fresh[:, 0])
    assert not torch.allclose(whole[4:, 1], fresh[:, 1])


def test_memory_is_kept_across_trajectories() -> None:
    policy = made(recurrent=6)
    generator = torch.Generator().manual_seed(3)
    observations = torch.randn(5, 2, 4, generator=generator)
    hidden = policy.initial(2)
    assert hidden is not None
    for step in range(5):
        output, hidden = policy.put_out(observations[step], hidden)
    at_once = policy.over(observations, policy.initial(2))
    last = distribution(SPACES[DISCRETE], output, None)
    torch.testing.assert_close(last.entropy(), at_once.entropy()[-1])
    emptied = policy.forget(hidden, torch.tensor([True, False]))
    assert emptied is not None
    assert hidden is not None
    assert (emptied[0] == 0).all()
    assert torch.equal(emptied[1], hidden[1])


def test_greedy_takes_the_most_probable_action() -> None:
    policy = made()
    observations = torch.randn(20, 4, generator=torch.Generator().manual_seed(3))
    acted = policy.act(observations, greedy=True)
    for seed in range(10):
        drawn = policy.act(observations, generator=torch.Generator().manual_seed(seed))
        assert (drawn.log_probabilities <= acted.log_probabilities + 1e-6).all()


def test_multi_axis_observations_are_flattened() -> None:
    task = dataclasses.replace(task_of(), observation=(2, 3))
    rl = RlTable(hidden=[8])
    policy = Policy.build(task, rl, generator=torch.Generator().manual_seed(1))
    assert policy.norm is not None
    policy.norm.update(torch.randn(9, 2, 3, generator=torch.Generator().manual_seed(1)))
    assert policy.prepared(torch.zeros(7, 5, 2, 3)).shape == (7, 5, 6)
    assert policy.act(torch.zeros(5, 2, 3)).actions.shape == (5, 1)


def test_a_policy_without_hidden_layers_is_linear() -> None:
    policy = Policy(task_of(CONTINUOUS), hidden=(), generator=torch.Generator().manual_seed(1))
    seen = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(policy.act(seen, greedy=True).actions, policy.head(seen))
