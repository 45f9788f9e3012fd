"""Experience that a policy could have had, without any environment: for tests of learning."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.rl.environments.spaces import CONTINUOUS, DISCRETE, MULTI_DISCRETE, Actions, TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

SPACES = {
    DISCRETE: Actions(kind=DISCRETE, sizes=(3,)),
    MULTI_DISCRETE: Actions(kind=MULTI_DISCRETE, sizes=(3, 2)),
    CONTINUOUS: Actions(kind=CONTINUOUS, sizes=(2,), low=(-1.0, -1.0), high=(1.0, 1.0)),
}


def task_of(kind: str = DISCRETE, *, policy: str = "p") -> TaskSpec:
    """Return a task with four numbers to see and actions of this kind."""
    return TaskSpec(policy=policy, task="t", observation=(4,), actions=SPACES[kind], gamma=0.97)


def walk(
    policy: Policy, *, length: int = 6, columns: int = 4, seed: int = 0, name: str = "p",
    ends: bool = True,
) -> Trajectory:  # fmt: skip
    """Return a trajectory in which `policy` acted, with random observations, rewards and ends."""
    generator = torch.Generator().manual_seed(seed)
    observations = 2 * torch.randn(length + 1, columns, 4, generator=generator) + 0.5
    hidden = start = policy.initial(columns)
    if start is not None:
        hidden = start = torch.randn(start.shape, generator=generator)
    chance = torch.rand(length, columns, generator=generator)
    terminated, truncated = (chance < 0.15) & ends, (chance > 0.85) & ends
    actions, log_probabilities = [], []
    for step in range(length):
        acted = policy.act(observations[step], hidden, generator=generator)
        actions.append(acted.actions)
        log_probabilities.append(acted.log_probabilities)
        hidden = policy.forget(acted.hidden, (terminated | truncated)[step])
    cut_at = truncated.nonzero()
    return Trajectory(
        policy=name, observations=observations, actions=torch.stack(actions).clone(),
        log_probabilities=torch.stack(log_probabilities).clone(),
        rewards=torch.randn(length, columns, generator=generator),
        terminated=terminated, truncated=truncated, cut_at=cut_at,
        cut_observations=torch.randn(len(cut_at), 4, generator=generator),
        hidden=start, sequence=seed + 1, actor="w1",
    ).check()  # fmt: skip


def valued(trajectory: Trajectory, *, seed: int = 5) -> ValuedTrajectory:
    """Return values of it out of the air."""
    generator = torch.Generator().manual_seed(seed)
    length, columns = trajectory.rewards.shape
    values: Tensor = torch.randn(length + 1, columns, generator=generator)
    return ValuedTrajectory(values, torch.randn(len(trajectory.cut_at), generator=generator), 1)
