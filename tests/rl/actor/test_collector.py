from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import DataError
from atoll.rl.actor.collector import Collector
from atoll.rl.environments.environment import task_of
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.nets.policy import Policy, RunningNorm
from atoll.rl.trajectory import Trajectory
from tests.rl.box2d import LANDER, NEEDS_BOX2D

WORLD = "tests.rl.worlds:counter"
ENVIRONMENTS = ["CartPole-v1", "Pendulum-v1", pytest.param(LANDER, marks=NEEDS_BOX2D)]


def pieces(
    env: str = WORLD, *, count: int = 3, recurrent: int = 0, **options: Any
) -> tuple[Collector, Policy]:
    """Return a collector and a policy that has seen something."""
    table = PolicyTable(name="light", env=env, options=options)
    columns = VectorEnv(table, count=count, seed=7)
    task = task_of(table, RlTable(), columns.environments[0])
    norm = RunningNorm(task.observation)
    norm.update(torch.randn(20, *task.observation, generator=torch.Generator().manual_seed(1)))
    policy = Policy(
        task, hidden=(8,), recurrent=recurrent, norm=norm,
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    with torch.no_grad():
        policy.head.weight.mul_(50)  # far from uniform
    return Collector(columns, task, actor="w1", seed=3), policy


def same(left: Trajectory, right: Trajectory) -> bool:
    """Return whether two trajectories are equal in every bit."""
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, torch.Tensor):
            if not torch.equal(a, b):
                return False
        elif field.name == "scale":
            if not all(torch.equal(x, y) for x, y in zip(a, b, strict=True)):
                return False
        elif a != b:
            return False
    return True


@pytest.mark.parametrize("recurrent", [0, 6])
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_trajectory_is_consistent_with_its_policy(env: str, recurrent: int) -> None:
    collector, policy = pieces(env, recurrent=recurrent)
    for number in (1, 2):
        trajectory = collector.collect(policy, 40).check()
        assert (trajectory.sequence, trajectory.actor, trajectory.policy) == (number, "w1", "light")
        assert trajectory.steps == 120
        log_probabilities, _ = policy.evaluate(trajectory)
        assert torch.allclose(trajectory.log_probabilities, log_probabilities, atol=1e-5)
    assert collector.steps == 240
    assert (trajectory.hidden is not None) == bool(recurrent)


def test_trajectories_follow_each_other_without_a_gap() -> None:
    collector, policy = pieces("CartPole-v1")
    first = collector.collect(policy, 10)
    assert torch.equal(collector.collect(policy, 10).observations[0], first.observations[-1])


def test_a_trajectory_can_be_learned_from() -> None:
    collector, policy = pieces("Pendulum-v1", recurrent=4)
    trajectory = collector.collect(policy, 5)
    torch.autograd.backward(policy.evaluate(trajectory)[0].sum())
    assert policy.head.weight.grad is not None


def test_truncated_episode_bootstraps_from_its_own_end() -> None:
    collector, policy = pieces(length=4, cut=True)
    trajectory = collector.collect(policy, 6)
    assert trajectory.cut_at.tolist() == [[3, 0], [3, 1], [3, 2]]
    assert trajectory.cut_observations[:, 0].tolist() == [4, 4, 4]
    following = trajectory.with_values(
        trajectory.observations[..., 0], trajectory.cut_observations[:, 0]
    ).next_values
    assert following[:, 0].tolist() == [1, 2, 3, 4, 1, 2]


def test_the_normaliser_is_used_and_reported_but_not_changed() -> None:
    collector, policy = pieces("CartPole-v1")
    assert policy.norm is not None
    before = policy.norm.scale()
    scale = collector.collect(policy, 20).scale
    assert scale is not None
    assert all(torch.equal(x, y) for x, y in zip(scale, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(scale, policy.norm.scale(), strict=True))


@pytest.mark.parametrize("recurrent", [0, 6])
@pytest.mark.parametrize("env", ENVIRONMENTS)
def test_a_restored_collector_goes_on_bit_for_bit(env: str, recurrent: int) -> None:
    collector, policy = pieces(env, recurrent=recurrent)
    for _ in range(3):
        collector.collect(policy, 17)
    saved = {name: part.clone() for name, part in collector.state_dict().items()}
    right = [collector.collect(policy, 17) for _ in range(3)]
    other, _ = pieces(env, recurrent=recurrent)
    other.load_state_dict(saved)
    again = [other.collect(policy, 17) for _ in range(3)]
    assert all(same(a, b) for a, b in zip(again, right, strict=True))
    assert (other.steps, other.sequence) == (collector.steps, 6)


def test_a_policy_forgets_an_episode_that_could_not_be_restored() -> None:
    collector, policy = pieces(recurrent=6, length=50, forgetful=True)
    collector.collect(policy, 10)
    other, _ = pieces(recurrent=6, length=50, forgetful=True)
    other.load_state_dict(collector.state_dict())
    trajectory = other.collect(policy, 3)
    assert trajectory.hidden is not None
    assert not trajectory.hidden.any()
    assert other.columns.unrepeatable == 3


@pytest.mark.parametrize("recurrent", [0, 6])
@pytest.mark.parametrize(
    ("wrong", "what", "step"), [("bad_reward", "rewards", 5), ("bad_seen", "observations", 6)]
)
def test_non_finite_numbers_cost_one_trajectory(
    wrong: str, what: str, step: int, recurrent: int
) -> None:
    collector, policy = pieces(recurrent=recurrent, length=20)
    setattr(collector.columns.environments[1]._environment, wrong, 6)  # type: ignore[attr-defined]
    said = rf"{what} are not finite; given: policy light, actor w1, trajectory 1, step {step}, colu"
    with pytest.raises(DataError, match=said + r"mn 1;.*dropped"):
        collector.collect(policy, 10)
    assert (collector.not_finite, collector.sequence) == (1, 0)
    setattr(collector.columns.environments[1]._environment, wrong, 0)  # type: ignore[attr-defined]
    trajectory = collector.collect(policy, 10).check()
    assert trajectory.sequence == 1
    assert trajectory.observations[0, :, 0].tolist() == [10, 0, 10]
    assert collector.not_finite == 1
    if trajectory.hidden is not None:
        assert trajectory.hidden.any(1).tolist() == [True, False, True]
    assert collector.state_dict()["counts"].tolist() == [1, collector.steps, 1]


def test_final_observation_is_checked_too() -> None:
    collector, policy = pieces(length=6, cut=True, bad_seen=6)
    with pytest.raises(DataError, match=r"^last observations of episodes.*step 5, column 0;"):
        collector.collect(policy, 10)
    room = collector.columns.room(1)
    assert room.observations[0, :, 0].tolist() == [0, 0, 0]


def test_foreign_trajectory_is_checked_at_its_cut() -> None:
    collector, policy = pieces(length=6, cut=True)
    trajectory = collector.collect(policy, 10).check()
    trajectory.cut_observations[1, 2] = float("nan")
    with pytest.raises(DataError, match=r"cut_observations that are not .*step 5, column 1"):
        trajectory.check()


def test_a_team_forgets_as_a_whole() -> None:
    collector, policy = pieces("tests.rl.worlds:pair", count=2, recurrent=6, length=20)
    collector.collect(policy, 3)
    environment: Any = collector.columns.environments[1]._environment  # type: ignore[attr-defined]
    environment.rewards = {"left": float("nan"), "right": 1.0}
    with pytest.raises(DataError, match=r"rewards are not finite.*column 2"):
        collector.collect(policy, 3)
    environment.rewards = {"left": 1.0, "right": 10.0}
    hidden = collector.collect(policy, 3).hidden
    assert hidden is not None
    assert hidden.any(1).tolist() == [True, True, False, False]


def test_the_last_observation_is_looked_at_too() -> None:
    collector, policy = pieces(length=20, bad_seen=6)
    with pytest.raises(DataError, match="step 6, column 0"):
        collector.collect(policy, 6)
    assert collector.columns.episodes == 3


@pytest.mark.parametrize(
    ("env", "what"), [("CartPole-v1", "log-probabilities of actions"), ("Pendulum-v1", "actions")]
)
def test_a_policy_that_is_no_longer_finite_is_named(env: str, what: str) -> None:
    collector, policy = pieces(env)
    with torch.no_grad():
        policy.head.bias.fill_(float("nan"))
    with pytest.raises(DataError, match=rf"^{what} are not finite; given: policy light.*step 0"):
        collector.collect(policy, 5)
    with torch.no_grad():
        policy.head.bias.zero_()
    collector.collect(policy, 5).check()
