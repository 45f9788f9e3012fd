"""One run: a group of tasks, one variant, one seed; and the curve that comes of it.

A curve has a point after every update: environment steps so far, and the mean return of the newest
20 episodes, as they were lived in training. Ours and stable-baselines3's are made the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.rl.in_process import LAST, Update, run_together
from bench.pooled.groups import Group

Point = tuple[int, float | None]
"""Environment steps; the mean return, None while fewer than 20 episodes have ended."""


class Drawn:
    """The curve of one policy, as it is lived."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._newest: deque[float] = deque(maxlen=LAST)

    def add(self, env_steps: int, returns: Sequence[float]) -> None:
        """Take the returns of the episodes that ended since the last point."""
        self._newest.extend(returns)
        full = len(self._newest) == LAST
        mean = round(sum(self._newest) / LAST, 2) if full else None
        self.points.append((env_steps, mean))


def learn(group: Group, variant: str, *, seed: int) -> dict[str, list[Point]]:
    """Return the curve of every task of a group, by name.

    Raises:
        ConfigError: an environment cannot be made, or stable-baselines3 is not installed.
    """
    rl = group.tables(variant)
    if variant == "sb3":
        from bench.pooled.baselines import learn_one

        return {
            table.name: learn_one(rl, table, seed=1000 * seed + index)
            for index, table in enumerate(rl.policies)
        }
    return _ours(rl, seed=seed)


def _ours(rl: RlTable, *, seed: int) -> dict[str, list[Point]]:
    drawn = {table.name: Drawn() for table in rl.policies}

    def note(update: Update) -> None:
        drawn[update.policy].add(update.env_steps, update.returns)

    run_together(rl, seed=seed, on_update=note)
    return {name: curve.points for name, curve in drawn.items()}


def settings(rl: RlTable, table: PolicyTable) -> dict[str, Any]:
    """Return what stable-baselines3 is given for a policy: the same numbers by its names."""
    rollout = rl.rollout * rl.environments
    return {
        "n_steps": rl.rollout,
        "batch_size": rollout // rl.minibatches,
        "n_epochs": rl.epochs,
        "gamma": rl.gamma,
        "gae_lambda": rl.gae_lambda,
        "clip_range": rl.clip,
        "ent_coef": rl.entropy,
        "max_grad_norm": rl.max_norm,
        "total_timesteps": table.steps or rl.steps,
    }
