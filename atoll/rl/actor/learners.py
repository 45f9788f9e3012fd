"""What an actor does with its experience: how its policy becomes better, by each algorithm.

How an actor's policy becomes better, by the algorithm and the critic of its job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.config.rl_tables import RlTable
from atoll.errors import AtollError
from atoll.rl.actor.value_sources import AskedValues, OwnValues, PulledValues, Source
from atoll.rl.algorithms.a3c import A3c
from atoll.rl.algorithms.impala import load_snapshot
from atoll.rl.algorithms.ppo import Ppo
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.critic.service import ServiceValues
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory

log = logging.getLogger(__name__)


class ActorLearner(Protocol):
    """One policy, and where its improvements come from."""

    @property
    def policy(self) -> Policy:
        """Who acts."""
        ...

    @property
    def module(self) -> nn.Module:
        """What the optimizer changes."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """Of the module; None: somebody else improves it."""
        ...

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
        ...

    def use(self, optimizer: Optimizer) -> None:
        """Step by another optimizer from now on: one that lets policies agree."""
        ...

    def catch_up(self) -> bool:
        """Take over what others have learned; return whether anything has come from them yet."""
        ...

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Take experience in, and write into it whose values were used; return figures.

        Raises:
            DataError: nothing could be learned from it.
            DeadlineExceeded: nobody said in time what it was worth.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        ...


class LocalLearner:
    """Learns by what it lives itself, and by the values of whatever critic there is."""

    def __init__(self, learner: Ppo | A3c, values: Source | None) -> None:
        """Begin with a fresh policy.

        Args:
            learner: What improves it.
            values: Says what experience is worth; None: the learner knows by itself.
        """
        self._learner, self._values = learner, values

    @property
    def policy(self) -> Policy:
        """Who acts."""
        return self._learner.policy

    @property
    def module(self) -> nn.Module:
        """What the optimizer changes."""
        return self._learner.module

    @property
    def optimizer(self) -> Optimizer:
        """Of the module."""
        return self._learner.optimizer

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
        return self._learner.version

    def use(self, optimizer: Optimizer) -> None:
        """Step by another optimizer from now on."""
        self._learner.optimizer = optimizer

    def catch_up(self) -> bool:
        """Take over the newest critic."""
        return self._values is None or self._values.catch_up()

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Value, improve, and let an own critic learn as well."""
        learner, values = self._learner, self._values
        if values is None:
            assert isinstance(learner, A3c)
            return learner.improve(trajectory)
        valued = values.of(trajectory)
        trajectory.value_version = valued.version
        told = learner.improve(trajectory, valued)
        about = values.learn(trajectory)
        if "value_loss" in about:
            told["value_loss"] = about["value_loss"]
        return told | {"value_version": float(valued.version)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return policy, optimizer, generators and the critic, as far as it is known."""
        values = {} if self._values is None else self._values.state_dict()
        return {**prefixed("learner", self._learner.state_dict()), **prefixed("values", values)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        self._learner.load_state_dict(parts_of(state, "learner"))
        if self._values is not None:
            self._values.load_state_dict(parts_of(state, "values"))


class FollowerLearner:
    """Acts by the newest policy that a learner elsewhere has made of everybody's experience."""

    optimizer = None

    def __init__(self, policy: Policy, *, newest: Callable[[], dict[str, Tensor] | None]) -> None:
        """Begin with a fresh policy, until the learner's comes.

        Args:
            policy: Who acts.
            newest: Returns the learner's newest weights, None if these are known.
        """
        self._policy, self._newest = policy, newest
        self._version, self._heard = 0, False

    @property
    def policy(self) -> Policy:
        """Who acts."""
        return self._policy

    @property
    def module(self) -> nn.Module:
        """The policy."""
        return self._policy

    @property
    def version(self) -> int:
        """Updates that the learner had done of it."""
        return self._version

    def use(self, optimizer: Optimizer) -> None:
        """Refuse: nothing is improved here."""
        raise TypeError("an actor of impala has no optimizer")

    def catch_up(self) -> bool:
        """Take over the learner's newest policy; return whether any has come."""
        found = self._newest()
        if found is None:
            return self._heard
        try:
            self._version = load_snapshot(self._policy, found)
            self._heard = True
        except AtollError as error:
            log.warning("the learner's policy cannot be used, the last one stays: %s", error)
        return self._heard

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Take the newest policy over for what comes next; waits for nothing."""
        self.catch_up()
        return {"value_version": float(self._version)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the policy as it is known here."""
        weights = prefixed("policy", self._policy.state_dict())
        return {**weights, "version": torch.tensor(self._version)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        load_module(self._policy, parts_of(state, "policy"), what="the saved policy")
        self._version = int(state["version"])


def make_actor_learner(
    task: TaskSpec, rl: RlTable, *, side: ActorChannel | None, service: ServiceValues | None,
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
        return FollowerLearner(policy, newest=side.newest_values)
    values = _source(task, rl, side=side, service=service, seed=seed)
    if rl.algorithm == "a3c":
        learner = A3c(task, rl, total_steps=total_steps, seed=seed("policy"))
        return LocalLearner(learner, None if learner.model.value is not None else values)
    return LocalLearner(Ppo(task, rl, total_steps=total_steps, seed=seed("policy")), values)


def _source(
    task: TaskSpec, rl: RlTable, *, side: ActorChannel | None, service: ServiceValues | None,
    seed: Callable[[str], int],
) -> Source:  # fmt: skip
    if service is not None:
        return AskedValues(service)
    if side is None:
        return OwnValues(task, rl, seed=seed("critic"))
    return PulledValues(task, rl, seed=seed("critic"), newest=side.newest_values)
