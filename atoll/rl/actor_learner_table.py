"""How an actor's policy becomes better, by the algorithm and the critic of its job."""

from __future__ import annotations

from collections.abc import Callable

import torch

from atoll.config.rl_tables import RlTable
from atoll.rl.a3c import A3c
from atoll.rl.actor_learners import ActorLearner, FollowsLearner, LearnsHere
from atoll.rl.actor_side import ActorSide
from atoll.rl.policy import Policy
from atoll.rl.ppo import Ppo
from atoll.rl.service import ServiceValues
from atoll.rl.spaces import TaskSpec
from atoll.rl.value_sources import AskedValues, OwnValues, PulledValues, Source


def make_actor_learner(
    task: TaskSpec, rl: RlTable, *, side: ActorSide | None, service: ServiceValues | None,
    total_steps: int, seed: Callable[[str], int],
) -> ActorLearner:  # fmt: skip
    """Return a fresh policy, and what makes it better.

    Args:
        task: What the policy is to do.
        rl: By which algorithm and whose values.
        side: The way to the critic; None: there is none.
        service: Where values are asked; None: they are not.
        total_steps: Environment steps of this actor.
        seed: Returns the seed for a purpose.
    """
    if rl.algorithm == "impala" and side is not None:
        generator = torch.Generator().manual_seed(seed("policy"))
        policy = Policy.build(task, rl, generator=generator)
        return FollowsLearner(policy, newest=side.newest_values)
    values = _source(task, rl, side=side, service=service, seed=seed)
    if rl.algorithm == "a3c":
        learner = A3c(task, rl, total_steps=total_steps, seed=seed("policy"))
        return LearnsHere(learner, None if learner.model.value is not None else values)
    return LearnsHere(Ppo(task, rl, total_steps=total_steps, seed=seed("policy")), values)


def _source(
    task: TaskSpec, rl: RlTable, *, side: ActorSide | None, service: ServiceValues | None,
    seed: Callable[[str], int],
) -> Source:  # fmt: skip
    if service is not None:
        return AskedValues(service)
    if side is None:
        return OwnValues(task, rl, seed=seed("critic"))
    return PulledValues(task, rl, seed=seed("critic"), newest=side.newest_values)
