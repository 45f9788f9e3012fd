"""What learns from everybody's experience: the pooled critic."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atoll.config.rl_tables import RlTable
from atoll.rl.critic import Critic
from atoll.rl.critic_side import CriticSide
from atoll.rl.policy import Policy
from atoll.rl.spaces import TaskSpec
from atoll.rl.trajectory import Trajectory

log = logging.getLogger(__name__)


class CriticMind:
    """One critic of many policies."""

    name = "critic"

    def __init__(self, rl: RlTable, *, seed: int) -> None:
        """Begin with a network that knows nobody."""
        self._rl = rl
        self._critic = Critic(rl, seed=seed)
        self._tasks: dict[str, TaskSpec] = {}
        self._policies: dict[str, Policy] = {}

    @property
    def module(self) -> nn.Module:
        """Its network."""
        return self._critic.net

    @property
    def version(self) -> int:
        """Updates so far."""
        return self._critic.version

    def add_policy(self, spec: TaskSpec) -> None:
        """Let it know a policy; a new one begins as the mean of the others."""
        self._critic.add_policy(spec)
        self._tasks[spec.policy] = spec

    def learn(self, trajectories: Sequence[Trajectory], side: CriticSide) -> dict[str, Any]:
        """Learn from trajectories of any policies; correct by their newest weights if need be."""
        if self._rl.critic == "corrected":
            self._follow(side)
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

    def _follow(self, side: CriticSide) -> None:
        """Take the newest weights of each policy, by which others' experience is weighed."""
        for name, task in self._tasks.items():
            weights = side.newest_policy(name)
            if weights is None:
                continue
            if name not in self._policies:
                self._policies[name] = Policy.build(task, self._rl, generator=torch.Generator())
            self._policies[name].load_state_dict(weights)
            self._critic.set_policy(name, self._policies[name])
