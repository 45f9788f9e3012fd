"""The critics that an actor can judge its experience by: its own, or the one that all share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

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
    """Says what experience is worth, and may learn from it."""

    def catch_up(self) -> bool:
        """Take over what is newest; return whether anything is known at all."""
        ...

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of everything in a trajectory.

        Raises:
            DeadlineExceeded: a service did not answer in time.
        """
        ...

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn from a trajectory, if it is this one's to learn; return figures."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that it knows."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        ...


class OwnValues:
    """A critic of one policy alone, which learns beside it."""

    def __init__(self, task: TaskSpec, rl: RlTable, *, seed: int) -> None:
        """Begin with a network that knows nothing."""
        self._critic = Critic(rl, seed=seed, kind="own")
        self._critic.add_policy(task)
        self._policy = task.policy

    def catch_up(self) -> bool:
        """Wait for nobody."""
        return True

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of everything in a trajectory."""
        return self._critic.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn from a trajectory; return figures."""
        return self._critic.learn([trajectory]).get(self._policy, {})

    def state_dict(self) -> dict[str, Tensor]:
        """Return all that it knows."""
        return prefixed("critic", self._critic.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        self._critic.load_state_dict(parts_of(state, "critic"))


class PulledValues:
    """A copy of the shared critic, as new as what has been heard of it."""

    def __init__(
        self, task: TaskSpec, rl: RlTable, *, seed: int,
        newest: Callable[[], dict[str, Tensor] | None],
    ) -> None:  # fmt: skip
        """Begin with a network that knows nothing.

        Args:
            task: Whose values are asked.
            rl: Widths of the network.
            seed: Of the weights until the first ones come.
            newest: Returns the critic's newest weights, None if these are known.
        """
        self._critic = Critic(rl, seed=seed)
        self._critic.add_policy(task)
        self._newest = newest
        self._held: dict[str, Tensor] = {}

    def catch_up(self) -> bool:
        """Take over the newest weights; return whether any have come."""
        found = self._newest()
        if found is not None:
            self._take(found)
        return bool(self._held)

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values by the newest weights; waits for nothing."""
        self.catch_up()
        return self._critic.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn nothing: the critic does, from what is sent to it."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights that were heard of last."""
        return prefixed("critic", self._held)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
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


class AskedValues:
    """The shared critic itself, asked each time."""

    def __init__(self, service: ServiceValues) -> None:
        """Ask it."""
        self._service = service

    def catch_up(self) -> bool:
        """Wait for nobody here: an answer is waited for."""
        return True

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the critic's answer.

        Raises:
            DeadlineExceeded: it did not come in time.
        """
        return self._service.of(trajectory)

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Learn nothing: the critic does, from what is sent to it."""
        return {}

    def state_dict(self) -> dict[str, Tensor]:
        """Return nothing: nothing is kept here."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take nothing up."""
