"""What a critic process trains: the pooled critic, or a critic together with all policies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atoll.config.rl_tables import RlTable
from atoll.errors import AtollError, ConfigError
from atoll.rl.algorithms.impala import ImpalaLearner
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.channel.critic import CriticChannel
from atoll.rl.critic.critic import Critic
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.seeds import seed_for
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory, ValuedTrajectory


class SeparateCritics:
    """One critic per policy behind the interface of a pooled one; nothing is shared."""

    def __init__(
        self, rl: RlTable, *, seed: int, device: torch.device = IN_MAIN_MEMORY
    ) -> None:  # fmt: skip
        self._rl, self._seed, self._device = rl, seed, device
        self._critics: dict[str, Critic] = {}
        self.version = 0
        """Number of updates."""

    def add_policy(self, spec: TaskSpec) -> None:
        """Make a critic for a policy, unless it has one."""
        if spec.policy not in self._critics:
            seed = seed_for(self._seed, "critic", spec.policy)
            self._critics[spec.policy] = Critic(
                self._rl, seed=seed, kind="own", device=self._device
            )
        self._critics[spec.policy].add_policy(spec)

    def values_of(self, trajectories: Sequence[Trajectory]) -> list[ValuedTrajectory]:
        """Return the values of several trajectories."""
        return [self._critics[one.policy].of(one) for one in trajectories]

    def learn(
        self, trajectories: Sequence[Trajectory], *, targets: Sequence[Tensor] | None = None
    ) -> dict[str, dict[str, float]]:
        """Train each critic on its own policy's trajectories; see `Critic.learn`."""
        stats: dict[str, dict[str, float]] = {}
        for name, critic in self._critics.items():
            mine = [i for i, one in enumerate(trajectories) if one.policy == name]
            if mine:
                goals = None if targets is None else [targets[i] for i in mine]
                stats |= critic.learn([trajectories[i] for i in mine], targets=goals)
        self.version += 1
        return stats

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        state = {"version": torch.tensor(self.version)}
        for number, critic in enumerate(self._critics.values()):
            state |= prefixed(str(number), critic.state_dict())
        return state

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`; the policies MUST be the same, in the same order."""
        for number, critic in enumerate(self._critics.values()):
            critic.load_state_dict(parts_of(tensors, str(number)))
        self.version = int(tensors["version"])


log = logging.getLogger(__name__)


class CriticLearner:
    """Trains one critic of many policies."""

    name = "critic"

    def __init__(
        self, rl: RlTable, *, seed: int, device: torch.device = IN_MAIN_MEMORY
    ) -> None:  # fmt: skip
        self._rl = rl
        self._critic = Critic(rl, seed=seed, device=device)
        self._tasks: dict[str, TaskSpec] = {}
        self._policies: dict[str, Policy] = {}
        self._answering: Critic | None = None
        """A copy that is not trained, for the value service."""

    def answer(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values by the last published weights; thread-safe.

        Raises:
            ConfigError: nothing was published yet, or the policy is not known.
        """
        if self._answering is None:
            raise ConfigError("this critic has published nothing yet", expected="a short wait")
        return self._answering.of(trajectory)

    @property
    def module(self) -> nn.Module:
        """The critic's network."""
        return self._critic.net

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._critic.version

    def add_policy(self, spec: TaskSpec) -> None:
        """Add a policy; its head starts as the mean of the others."""
        self._critic.add_policy(spec)
        self._tasks[spec.policy] = spec

    def learn(self, trajectories: Sequence[Trajectory], side: CriticChannel) -> dict[str, Any]:
        """Learn from trajectories, corrected by the policies' newest weights if needed."""
        if self._rl.critic == "corrected":
            self._follow(side)
        before = self._critic.refused
        stats = self._critic.learn(trajectories)
        side.counts["not_finite"] += self._critic.refused - before
        return stats

    def publish(self, side: CriticChannel) -> None:
        """Publish the weights, or let the value service answer with them."""
        snapshot = self._critic.snapshot()
        if self._rl.values == "service":
            answering = Critic(self._rl, seed=0, device=self._critic.device)
            answering.load_snapshot(snapshot)
            self._answering = answering
        side.publish(snapshot, version=self.version)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on."""
        return self._critic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self._critic.load_state_dict(state)

    def _follow(self, side: CriticChannel) -> None:
        """Load each policy's newest weights, by which other policies' experience is weighed."""
        for name, task in self._tasks.items():
            try:
                weights = side.newest_policy(name)
                if weights is None:
                    continue
                if name not in self._policies:
                    built = Policy.build(task, self._rl, generator=torch.Generator())
                    self._policies[name] = built.to(self._critic.device)
                load_module(self._policies[name], weights, what=f"policy {name}")
            except AtollError as error:
                log.warning("a policy's weights cannot be used, the last ones stay: %s", error)
                continue
            self._critic.set_policy(name, self._policies[name])


class PoliciesLearner:
    """Trains all policies and their critic, for actors that only act."""

    name = "learner"

    def __init__(
        self, rl: RlTable, *, seed: int, device: torch.device = IN_MAIN_MEMORY
    ) -> None:  # fmt: skip
        self._rl = rl
        own = rl.critic == "own"
        self._critic: Critic | SeparateCritics = (
            SeparateCritics(rl, seed=seed, device=device)
            if own
            else Critic(rl, seed=seed, device=device)
        )
        self._learner = ImpalaLearner(
            [], rl, self._critic, total_steps=rl.steps, seed=seed, device=device
        )
        self._tasks: dict[str, TaskSpec] = {}
        self._published: dict[str, int] = {}
        """The newest published version of each policy."""
        self.module = nn.ModuleDict()

    @property
    def version(self) -> int:
        """Number of updates."""
        return self._critic.version

    def add_policy(self, spec: TaskSpec) -> None:
        """Start a fresh policy for a task."""
        if spec.policy in self._tasks:
            return
        steps = [table.steps for table in self._rl.policies if table.name == spec.policy]
        self._learner.total_steps = next((n for n in steps if n), self._rl.steps)
        self._critic.add_policy(spec)
        self._learner.add_policy(spec)
        self._tasks[spec.policy] = spec
        # Module names must not contain dots, nor be those of methods; policy names may.
        name = spec.policy.replace(".", ":")
        while hasattr(self.module, name):
            name += ":"
        self.module[name] = self._learner.learners[spec.policy].policy

    def learn(self, trajectories: Sequence[Trajectory], side: CriticChannel) -> dict[str, Any]:
        """Improve the policies of these trajectories, and the critic."""
        return self._learner.learn(trajectories)

    def publish(self, side: CriticChannel) -> None:
        """Publish each changed policy to its actors."""
        for policy in self._tasks:
            version = self._learner.version(policy)
            if self._published.get(policy) != version:
                side.publish_policy(policy, self._learner.snapshot(policy))
                self._published[policy] = version

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next update depends on."""
        tasks = [task.to_json() for task in self._tasks.values()]
        return {"tasks": tasks, "learner": self._learner.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        for task in state["tasks"]:
            self.add_policy(TaskSpec.from_json(task))
        self._learner.load_state_dict(state["learner"])
