"""Actors and critic in one process and in a fixed order: a seed always gives the same curves.

In one round every policy with steps left collects a rollout, asks the critic for its values, and
does its update; then the critic learns from all rollouts of the round. This runs the parts of a
job's members without queues, clocks and processes between them. Tests and `python -m bench.pooled`
use it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from atoll.config.rl_tables import PolicyTable, RlTable
from atoll.errors import ConfigError, DataError
from atoll.rl.actor.collector import Collector
from atoll.rl.algorithms.ppo import Ppo
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY
from atoll.rl.critic.critic import Critic
from atoll.rl.environments.environment import task_of
from atoll.rl.environments.vector_env import VectorEnv
from atoll.rl.seeds import seed_for
from atoll.rl.trajectory import Trajectory

LAST = 20
"""Number of episodes over which a return is averaged."""


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one update of one policy."""

    policy: str
    env_steps: int
    """Steps of this policy so far."""
    returns: tuple[float, ...]
    """Undiscounted returns of the episodes that ended in the rollout."""
    stats: dict[str, float]
    """The figures of `Ppo.improve`, and `value_version`."""


@dataclass(slots=True)
class Curve:
    """The updates of one policy."""

    policy: str
    updates: list[Update] = field(default_factory=list)
    dropped: int = 0
    """Rollouts dropped because a value was not finite."""

    @property
    def env_steps(self) -> int:
        """Environment steps that were learned from."""
        return self.updates[-1].env_steps if self.updates else 0

    def last_return(self, episodes: int = LAST) -> float | None:
        """Return the mean of the newest episodes' returns; None if no episode has ended."""
        newest: list[float] = []
        for update in reversed(self.updates):
            newest[:0] = update.returns
            if len(newest) >= episodes:
                break
        newest = newest[-episodes:]
        return sum(newest) / len(newest) if newest else None


class ActorSlot:
    """One actor: its environments, its policy, and the critic that it uses."""

    def __init__(
        self, table: PolicyTable, rl: RlTable, *, index: int, seed: int, device: torch.device
    ) -> None:
        """Make the environments and the policy.

        Raises:
            ConfigError: the environment cannot be made.
        """
        joint = rl.critic == "joint"
        columns = VectorEnv(table, count=rl.environments, seed=seed, policy=index, joint=joint)
        self.columns, self.rl = columns, rl
        self.total_steps = table.steps or rl.steps
        self.task = task_of(table, rl, columns.environments[0])
        name = table.name
        self.learner = Ppo(
            self.task, rl, total_steps=self.total_steps, seed=seed_for(seed, "policy", name),
            device=device,
        )  # fmt: skip
        self.collector = Collector(
            columns, self.task, actor=f"w{index + 1}", seed=seed_for(seed, "actions", name, 0)
        )
        self.curve = Curve(table.name)

    @property
    def done(self) -> bool:
        """Whether all its steps are done."""
        return self.collector.steps >= self.total_steps

    def live(self, critic: Critic) -> Trajectory | None:
        """Collect a rollout and learn from it; None if a value was not finite."""
        try:
            trajectory = self.collector.collect(self.learner.policy, self.rl.rollout)
            valued = critic.of(trajectory)
            trajectory.policy_version = self.learner.version
            trajectory.value_version = valued.version
            stats = self.learner.improve(trajectory, valued)
        except DataError:
            self.curve.dropped += 1
            return None
        stats["value_version"] = float(valued.version)
        self.curve.updates.append(
            Update(self.task.policy, self.learner.steps, tuple(trajectory.returns), stats)
        )
        return trajectory


class InProcessRun:
    """All policies of a job and their critics, advanced round by round.

    Raises:
        ConfigError: the job is of another kind, or an environment cannot be made.
    """

    def __init__(
        self, rl: RlTable, *, seed: int, device: torch.device = IN_MAIN_MEMORY
    ) -> None:  # fmt: skip
        if rl.algorithm != "ppo" or rl.critic == "none":
            raise ConfigError(
                "this cannot run in one process",
                given=f'algorithm = "{rl.algorithm}", critic = "{rl.critic}"',
                expected='algorithm = "ppo" with any critic but "none"',
                remedy="run it as a job",
            )
        self.rl = rl
        self.actors: list[ActorSlot] = []
        with ExitStack() as after_error:
            after_error.callback(self.close)
            for index, table in enumerate(rl.policies):
                self.actors.append(ActorSlot(table, rl, index=index, seed=seed, device=device))
            after_error.pop_all()
        own = rl.critic == "own"
        purposes = [("critic", table.name) for table in rl.policies] if own else [("critic",)]
        self.critics = [
            Critic(rl, seed=seed_for(seed, *purpose), device=device) for purpose in purposes
        ]
        """The one of all policies, or each policy's own."""
        self.rounds = 0
        for index, actor in enumerate(self.actors):
            self.critic_of(index).add_policy(actor.task)
        self._published = self.critics
        if rl.push_every > 1 and not own:
            self._published = [Critic(rl, seed=0, device=device)]
            self._publish()

    def critic_of(self, index: int) -> Critic:
        """Return the critic that learns from a policy's experience."""
        return self.critics[index % len(self.critics)]

    def curves(self) -> list[Curve]:
        """Return the updates of every policy so far."""
        return [actor.curve for actor in self.actors]

    @property
    def done(self) -> bool:
        """Whether every policy has done all its steps."""
        return all(actor.done for actor in self.actors)

    def round(self) -> list[Update]:
        """Do one round; return its updates."""
        lived: list[list[Trajectory]] = [[] for _ in self.critics]
        updates = []
        for index, actor in enumerate(self.actors):
            if actor.done:
                continue
            which = index % len(self.critics)
            trajectory = actor.live(self._published[which])
            if trajectory is not None:
                lived[which].append(trajectory)
                updates.append(actor.curve.updates[-1])
        for critic, trajectories in zip(self.critics, lived, strict=True):
            if trajectories:
                self._learn(critic, trajectories)
        self.rounds += 1
        if self._published is not self.critics and self.rounds % self.rl.push_every == 0:
            self._publish()
        return updates

    def _learn(self, critic: Critic, trajectories: list[Trajectory]) -> None:
        if self.rl.critic == "corrected":
            for actor in self.actors:
                critic.set_policy(actor.task.policy, actor.learner.policy)
        critic.learn(trajectories)

    def _publish(self) -> None:
        for shown, critic in zip(self._published, self.critics, strict=True):
            shown.load_snapshot(critic.snapshot())

    def close(self) -> None:
        """Close the environments."""
        for actor in self.actors:
            actor.columns.close()


def run_together(
    rl: RlTable, *, seed: int, on_update: Callable[[Update], None] | None = None
) -> list[Curve]:
    """Run a job's policies and critic to the end in this process.

    `rl` is `ppo` with any critic. The same seed gives the same curves, bit for bit.

    Returns:
        One curve for each policy, in their order.

    Raises:
        ConfigError: the job is of another kind, or an environment cannot be made.
    """
    together = InProcessRun(rl, seed=seed)
    try:
        while not together.done:
            for update in together.round():
                if on_update is not None:
                    on_update(update)
    finally:
        together.close()
    return together.curves()
