"""Experience made up for tests of the critic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.rl.environments.spaces import Actions, TaskSpec
from atoll.rl.trajectory import Trajectory


def table(**changes: object) -> RlTable:
    """Return a small critic's settings."""
    settings: dict[str, object] = {
        "critic_hidden": [16, 16], "critic_epochs": 4, "critic_minibatches": 2,
    }  # fmt: skip
    return RlTable(**{**settings, **changes})  # type: ignore[arg-type]


def task(policy: str, **changes: object) -> TaskSpec:
    """Return a task with observations of three numbers and two actions."""
    settings: dict[str, object] = {
        "policy": policy, "task": policy, "observation": (3,), "gamma": 0.9,
        "actions": Actions(kind="discrete", sizes=(2,)),
    }  # fmt: skip
    return TaskSpec(**{**settings, **changes})  # type: ignore[arg-type]


def lived(
    policy: str,
    *,
    seed: int = 0,
    rewards: Callable[[Tensor], Tensor] = lambda seen: seen[..., 0],
    length: int = 8,
    columns: int = 4,
    features: int = 3,
    sequence: int = 1,
    actor: str = "",
    cut: bool = False,
    ends: float = 0.2,
) -> Trajectory:
    """Return one trajectory: observations are noise, rewards a function of them."""
    generator = torch.Generator().manual_seed(seed)
    seen = torch.randn(length + 1, columns, features, generator=generator)
    terminated = torch.rand(length, columns, generator=generator) < ends
    truncated = torch.zeros_like(terminated)
    if cut:
        truncated[length // 2] = ~terminated[length // 2]
    cut_at = truncated.nonzero()
    return Trajectory(
        policy=policy,
        observations=seen,
        actions=torch.randint(2, (length, columns, 1), generator=generator),
        log_probabilities=torch.full((length, columns), 0.5).log(),
        rewards=rewards(seen[:-1]),
        terminated=terminated,
        truncated=truncated,
        cut_at=cut_at,
        cut_observations=torch.randn(len(cut_at), features, generator=generator),
        sequence=sequence,
        actor=actor or policy,
    )
