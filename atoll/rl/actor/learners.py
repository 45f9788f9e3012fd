"""How an actor's policy improves, by the algorithm and the critic of its job."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.config.rl_tables import RlTable
from atoll.errors import AtollError
from atoll.rl.actor.value_sources import OwnValues, PulledValues, RequestedValues, Source
from atoll.rl.algorithms.a3c import A3c
from atoll.rl.algorithms.impala import load_snapshot
from atoll.rl.algorithms.ppo import Ppo
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.channel.actor import ActorChannel
from atoll.rl.critic.service import ServiceValues
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory

log = logging.getLogger(__name__)


class ActorLearner(Protocol):
    """One policy and the source of its improvements."""

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        ...

    @property
    def module(self) -> nn.Module:
        """The module that the optimizer changes."""
        ...

    @property
    def optimizer(self) -> Optimizer | None:
        """The module's optimizer; None if another member improves the policy."""
        ...

    @property
    def version(self) -> int:
        """Number of updates of the policy."""
        ...

    def use(self, optimizer: Optimizer) -> None:
        """Replace the optimizer with one that wraps it and synchronizes policies."""
        ...

    def catch_up(self) -> bool:
        """Load the newest weights from the critic; return whether any have ever arrived."""
        ...

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn from a trajectory, note in it which values were used, and return figures.

        Raises:
            DataError: the trajectory cannot be learned from.
            DeadlineExceeded: its values did not arrive in time.
        """
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        ...


class LocalLearner:
    """Learns from its own trajectories, with the values of any critic."""

    def __init__(self, learner: Ppo | A3c, values: Source | None) -> None:
        """Start with a fresh policy.

        `values` is None if the learner has values of its own.
        """
        self._learner, self._values = learner, values

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        return self._learner.policy

    @property
    def module(self) -> nn.Module:
        """The module that the optimizer changes."""
        return self._learner.module

    @property
    def optimizer(self) -> Optimizer:
        """The module's optimizer."""
        return self._learner.optimizer

    @property
    def version(self) -> int:
        """Number of updates of the policy."""
        return self._learner.version

    def use(self, optimizer: Optimizer) -> None:
        """Replace the optimizer."""
        self._learner.optimizer = optimizer

    def catch_up(self) -> bool:
        """Load the newest critic."""
        return self._values is None or self._values.catch_up()

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Value a trajectory, improve the policy, and train an own critic as well."""
        learner, values = self._learner, self._values
        if values is None:
            assert isinstance(learner, A3c)
            return learner.improve(trajectory)
        valued = values.of(trajectory)
        trajectory.value_version = valued.version
        stats = learner.improve(trajectory, valued)
        about = values.learn(trajectory)
        if "value_loss" in about:
            stats["value_loss"] = about["value_loss"]
        return stats | {"value_version": float(valued.version)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return policy, optimizer, generators, and the critic's weights if known."""
        values = {} if self._values is None else self._values.state_dict()
        return {**prefixed("learner", self._learner.state_dict()), **prefixed("values", values)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        self._learner.load_state_dict(parts_of(state, "learner"))
        if self._values is not None:
            self._values.load_state_dict(parts_of(state, "values"))


class FollowerLearner:
    """Acts by the newest policy of a central learner, which trains on all actors' experience."""

    optimizer = None

    def __init__(self, policy: Policy, *, newest: Callable[[], dict[str, Tensor] | None]) -> None:
        """Start with a fresh policy, until the learner's arrives.

        `newest` returns the learner's newest weights, or None if they were returned before.
        """
        self._policy, self._newest = policy, newest
        self._version, self._received = 0, False

    @property
    def policy(self) -> Policy:
        """The policy that acts."""
        return self._policy

    @property
    def module(self) -> nn.Module:
        """The policy."""
        return self._policy

    @property
    def version(self) -> int:
        """Number of updates of the policy by the learner."""
        return self._version

    def use(self, optimizer: Optimizer) -> None:
        """Raise: the policy is not improved here."""
        raise TypeError("an actor of impala has no optimizer")

    def catch_up(self) -> bool:
        """Load the learner's newest policy; return whether any has ever arrived."""
        found = self._newest()
        if found is None:
            return self._received
        try:
            self._version = load_snapshot(self._policy, found)
            self._received = True
        except AtollError as error:
            log.warning("the learner's policy cannot be used, the last one is kept: %s", error)
        return self._received

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Load the newest policy for the next trajectory, without waiting."""
        self.catch_up()
        return {"value_version": float(self._version)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the policy's weights."""
        weights = prefixed("policy", self._policy.state_dict())
        return {**weights, "version": torch.tensor(self._version)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        load_module(self._policy, parts_of(state, "policy"), what="the saved policy")
        self._version = int(state["version"])


def make_actor_learner(
    task: TaskSpec, rl: RlTable, *, side: ActorChannel | None, service: ServiceValues | None,
    total_steps: int, seed: Callable[[str], int], device: torch.device = IN_MAIN_MEMORY,
) -> ActorLearner:  # fmt: skip
    """Return a fresh policy and its learner, which compute on `device`.

    `total_steps` are this actor's; `seed` returns the seed for a purpose.
    """
    if rl.algorithm == "impala" and side is not None:
        generator = torch.Generator().manual_seed(seed("policy"))
        policy = Policy.build(task, rl, generator=generator).to(device)
        return FollowerLearner(policy, newest=side.newest_values)
    values = _source(task, rl, side=side, service=service, seed=seed, device=device)
    if rl.algorithm == "a3c":
        learner = A3c(task, rl, total_steps=total_steps, seed=seed("policy"), device=device)
        return LocalLearner(learner, None if learner.model.value is not None else values)
    ppo = Ppo(task, rl, total_steps=total_steps, seed=seed("policy"), device=device)
    return LocalLearner(ppo, values)


def _source(
    task: TaskSpec, rl: RlTable, *, side: ActorChannel | None, service: ServiceValues | None,
    seed: Callable[[str], int], device: torch.device,
) -> Source:  # fmt: skip
    if service is not None:
        return RequestedValues(service)
    if side is None:
        return OwnValues(task, rl, seed=seed("critic"), device=device)
    return PulledValues(task, rl, seed=seed("critic"), device=device, newest=side.newest_values)
