"""Which brain an actor has, by the algorithm and the critic of its job."""

from __future__ import annotations

from collections.abc import Callable

from atoll.config.rl_tables import RlTable
from atoll.rl.actor_side import ActorSide
from atoll.rl.brains import Brain, ByPpo
from atoll.rl.ppo import Ppo
from atoll.rl.sources import OwnValues, PulledValues, Source
from atoll.rl.spaces import TaskSpec


def make_brain(
    task: TaskSpec, rl: RlTable, *, side: ActorSide | None, total_steps: int,
    seed: Callable[[str], int],
) -> Brain:  # fmt: skip
    """Return a fresh policy, and what makes it better.

    Args:
        task: What the policy is to do.
        rl: By which algorithm and whose values.
        side: The way to the critic; None: there is none.
        total_steps: Environment steps of this actor.
        seed: Returns the seed for a purpose.
    """
    learner = Ppo(task, rl, total_steps=total_steps, seed=seed("policy"))
    return ByPpo(learner, _source(task, rl, side=side, seed=seed))


def _source(
    task: TaskSpec, rl: RlTable, *, side: ActorSide | None, seed: Callable[[str], int]
) -> Source:
    if side is None:
        return OwnValues(task, rl, seed=seed("critic"))
    return PulledValues(task, rl, seed=seed("critic"), newest=side.newest_values)
