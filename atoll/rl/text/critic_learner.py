"""What learns from the completions of all policies, for the critic's role: the value model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from atoll.errors import ConfigError
from atoll.rl.critic_side import CriticSide
from atoll.rl.spaces import TaskSpec
from atoll.rl.text.critic import TextCritic


class TextCriticLearner:
    """One value model of many language models.

    Args:
        critic: Made for all policies of the job.
    """

    name = "critic"

    def __init__(self, critic: TextCritic) -> None:
        self._critic = critic

    @property
    def module(self) -> nn.Module:
        """The value model."""
        return self._critic.model

    @property
    def version(self) -> int:
        """Updates so far."""
        return self._critic.version

    def add_policy(self, spec: TaskSpec) -> None:
        """Look whether a policy is one of the job.

        Raises:
            ConfigError: it is not.
        """
        if spec.policy not in self._critic.policies:
            raise ConfigError(
                "the value model has no such policy", given=spec.policy,
                expected=", ".join(self._critic.policies),
            )  # fmt: skip

    def learn(self, trajectories: Sequence[Any], side: CriticSide) -> dict[str, Any]:
        """Do one update with completions of any policies; return figures by policy."""
        return self._critic.learn(trajectories)

    def publish(self, side: CriticSide) -> None:
        """Publish its weights."""
        side.publish(self._critic.snapshot(), version=self.version)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on."""
        return self._critic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned."""
        self._critic.load_state_dict(state)
