"""Where an actor gets values: an own critic, a copy of the pooled one, or the value service."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import AtollError
from atoll.rl.critic.critic import Critic
from atoll.rl.critic.service import ServiceValues
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.state_saver import parts_of, prefixed
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

log = logging.getLogger(__name__)


class Source(Protocol):
    """Values trajectories, and may learn from them."""

    def catch_up(self) -> bool:
        """Load the newest weights; return whether any have ever arrived."""
        ...

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of a trajectory.

        Raises:
            DeadlineExceeded: a service did not answer in time.
        """
        ...

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn from a trajectory, if this source is trained here; return figures."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the source's state."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        ...


class OwnValues:
    """A critic of one policy alone, trained beside it."""

    def __init__(self, task: TaskSpec, rl: RlTable, *, seed: int, device: torch.device) -> None:
        self._critic = Critic(rl, seed=seed, kind="own", device=device)
        self._critic.add_policy(task)
        self._policy = task.policy

    def catch_up(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of a trajectory."""
        return self._critic.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn from a trajectory; return figures."""
        return self._critic.learn([trajectory]).get(self._policy, {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return the critic's state."""
        return prefixed("critic", self._critic.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        self._critic.load_state_dict(parts_of(state, "critic"))


class PulledValues:
    """A copy of the pooled critic, with its newest published weights."""

    def __init__(
        self, task: TaskSpec, rl: RlTable, *, seed: int, device: torch.device,
        newest: Callable[[], dict[str, Tensor] | None],
    ) -> None:  # fmt: skip
        """Start with an untrained network.

        `newest` returns the critic's newest weights, or None if they were returned before.
        """
        self._critic = Critic(rl, seed=seed, device=device)
        self._critic.add_policy(task)
        self._newest = newest
        self._held: dict[str, Tensor] = {}

    def catch_up(self) -> bool:
        """Load the newest weights; return whether any have ever arrived."""
        found = self._newest()
        if found is not None:
            self._take(found)
        return bool(self._held)

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values by the newest weights, without waiting."""
        self.catch_up()
        return self._critic.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn nothing: the critic learns from the trajectories sent to it."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the newest known weights."""
        return prefixed("critic", self._held)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        held = parts_of(state, "critic")
        if held:
            self._take(held)

    def _take(self, weights: dict[str, Tensor]) -> None:
        try:
            self._critic.load_snapshot(weights)
        except AtollError as error:
            log.warning("the critic's weights cannot be used, the last ones stay: %s", error)
            return
        self._held = weights


class RequestedValues:
    """The pooled critic itself, queried for each trajectory."""

    def __init__(self, service: ServiceValues) -> None:
        self._service = service

    def catch_up(self) -> bool:
        """Return True: `of` waits for the answer."""
        return True

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the critic's answer.

        Raises:
            DeadlineExceeded: the answer did not arrive in time.
        """
        return self._service.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn nothing: the critic learns from the trajectories sent to it."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Ignore the state."""
