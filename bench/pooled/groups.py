"""The two groups of tasks that are compared, and what counts as learned."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.config.rl_tables import PolicyTable, RlTable

VARIANTS = ("pooled", "own", "unconditioned", "sb3")
"""One critic conditioned on the policy, a critic each, one unconditioned, stable-baselines3."""

NUMBERS = (
    "environments", "rollout", "epochs", "minibatches", "gamma", "gae_lambda", "clip", "entropy",
    "lr", "anneal", "max_norm", "target_kl", "hidden", "recurrent", "normalise", "critic_lr",
    "critic_hidden", "critic_epochs", "critic_minibatches", "push_every",
)  # fmt: skip
"""Of `[rl]`, what a run depends on."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One policy's environment."""

    name: str
    env: str
    options: Mapping[str, Any] = field(default_factory=dict)
    target: float
    """The mean return of the newest 20 episodes at which it counts as learned."""
    steps: int
    """Environment steps it is given."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Four tasks and the numbers that all variants learn with."""

    name: str
    tasks: Sequence[Task]
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the defaults of `[rl]`."""
    seeds: int = 5
    variants: Sequence[str] = VARIANTS

    def tables(self, variant: str) -> RlTable:
        """Return the job file's tables for one variant; `sb3` learns like `own`."""
        return RlTable(
            **{
                "critic": "own" if variant == "sb3" else variant,
                "policies": [
                    PolicyTable(name=t.name, env=t.env, options=t.options, steps=t.steps)
                    for t in self.tasks
                ],
                **self.changes,
            }
        )

    @property
    def steps(self) -> int:
        """Environment steps of all tasks together."""
        return sum(task.steps for task in self.tasks)

    def digest(self) -> str:
        """Return a word for everything that a run depends on: other numbers, another word."""
        rl = self.tables("own")
        facts = [[getattr(rl, name) for name in NUMBERS], [vars(task) for task in self.tasks]]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=4).hexdigest()

    def shortened(self, steps: int) -> Group:
        """Return it with fewer steps of every task, for the quick form and tests."""
        return dataclasses.replace(
            self, tasks=[dataclasses.replace(task, steps=steps) for task in self.tasks], seeds=1
        )


def _pole(name: str, **options: float) -> Task:
    return Task(
        name=name,
        env="atoll.rl.environments.physics:cartpole",
        options=options,
        target=400.0,
        steps=25_600,
    )


RELATED = Group(
    name="related",
    seeds=10,
    tasks=[
        _pole("plain"),
        _pole("long", length=1.0),
        _pole("heavy", gravity=15.0, masspole=0.3),
        _pole("weak", gravity=5.0, length=0.3, force=7.0),
    ],
    changes={"rollout": 32, "gae_lambda": 0.9},
)
"""One pole on a cart, with other lengths, masses, forces and gravities.

Short rollouts and a smaller lambda: policies are improved often, and more by values than by what
came later.
"""

DIFFERENT = Group(
    name="different",
    seeds=5,
    tasks=[
        Task(name="cartpole", env="CartPole-v1", target=400.0, steps=51_200),
        Task(name="acrobot", env="Acrobot-v1", target=-100.0, steps=76_800),
        Task(name="pendulum", env="Pendulum-v1", target=-300.0, steps=153_600),
        Task(name="lander", env="LunarLander-v3", target=0.0, steps=153_600),
    ],
    changes={
        "rollout": 128,
        "minibatches": 8,
        "lr": 7e-4,
        "entropy": 0.005,
        "critic_lr": 3e-3,
    },
)
"""Tasks with nothing in common but that they are learned by the same machine."""

QUICK_CRITICS = dataclasses.replace(
    RELATED,
    name="related_quick_critics",
    seeds=5,
    changes={**RELATED.changes, "critic_lr": 3e-3},
    variants=("pooled", "own"),
)
"""The related tasks with critics that learn three times as fast: what is left of the advantage when
own critics are at their best."""

GROUPS = {group.name: group for group in (RELATED, QUICK_CRITICS, DIFFERENT)}
