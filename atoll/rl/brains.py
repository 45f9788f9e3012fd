"""What an actor does with its experience: how its policy becomes better, by each algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.rl.policy import Policy
from atoll.rl.ppo import Ppo
from atoll.rl.sources import Source
from atoll.rl.state import parts_of, prefixed
from atoll.rl.trajectory import Trajectory


class Brain(Protocol):
    """One policy, and where its improvements come from."""

    optimizer: Optimizer
    """Of the policy; may be replaced by one that makes it agree with others."""

    @property
    def policy(self) -> Policy:
        """Who acts."""
        ...

    @property
    def trained(self) -> nn.Module:
        """What the optimizer changes, in one module."""
        ...

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
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


class ByPpo:
    """Learns here and now, by values of whatever critic there is."""

    def __init__(self, learner: Ppo, values: Source) -> None:
        """Begin with a fresh policy."""
        self._learner, self._values = learner, values

    @property
    def optimizer(self) -> Optimizer:
        """Of the policy."""
        return self._learner.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._learner.optimizer = optimizer

    @property
    def policy(self) -> Policy:
        """Who acts."""
        return self._learner.policy

    @property
    def trained(self) -> nn.Module:
        """The policy."""
        return self._learner.policy

    @property
    def version(self) -> int:
        """Updates of the policy so far."""
        return self._learner.version

    def learn(self, trajectory: Trajectory) -> dict[str, float]:
        """Value, improve, and let an own critic learn as well."""
        valued = self._values.of(trajectory)
        trajectory.value_version = valued.version
        told = self._learner.improve(trajectory, valued)
        about = self._values.learn(trajectory)
        if "value_loss" in about:
            told["value_loss"] = about["value_loss"]
        return told | {"value_version": float(valued.version)}

    def state_dict(self) -> dict[str, Tensor]:
        """Return policy, optimizer, generators and the critic, as far as it is known."""
        return {
            **prefixed("learner", self._learner.state_dict()),
            **prefixed("values", self._values.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned."""
        self._learner.load_state_dict(parts_of(state, "learner"))
        self._values.load_state_dict(parts_of(state, "values"))
