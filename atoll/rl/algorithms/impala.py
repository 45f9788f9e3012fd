"""IMPALA: one learner trains all policies; actors only act, and V-trace corrects their staleness.

IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures
(https://arxiv.org/abs/1802.01561).

Differs from the paper:
  * the value network is the critic of all policies; it learns V-trace's targets;
  * a trajectory is cut into `minibatches` groups of columns, a gradient step each, and V-trace is
    computed anew for each with the current policy; `epochs` repeats them, which V-trace corrects
    like any other staleness;
  * advantages are divided by their deviation, so that the size of rewards does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.config.rl_tables import RlTable
from atoll.errors import unknown
from atoll.rl.algorithms.losses import (
    approximate_divergence,
    explained_variance,
    policy_gradient_loss,
    vtrace,
)
from atoll.rl.algorithms.ppo import in_order
from atoll.rl.algorithms.targets import OffPolicyBatch
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY, TrainedPolicy
from atoll.rl.environments.spaces import TaskSpec
from atoll.rl.nets.policy import Policy
from atoll.rl.state_saver import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory, ValuedTrajectory

VERSION = "version"
"""Name of the number of updates in a snapshot."""
SMALLEST_DEVIATION = 1e-8
APART = 1_000_003
"""Distance between the seeds of two policies."""


class LearnerStep(Protocol):
    """A critic that learns given targets."""

    def values_of(self, trajectories: Sequence[Trajectory]) -> list[ValuedTrajectory]:
        """Return the values of several trajectories."""
        ...

    def learn(
        self, trajectories: Sequence[Trajectory], *, targets: Sequence[Tensor] | None = None
    ) -> Mapping[str, Mapping[str, float]]:
        """Learn targets [T, B] of each trajectory; return figures of each policy."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on."""
        ...

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`."""
        ...


class ImpalaLearner:
    """All policies of a job and their critic, trained on the actors' trajectories."""

    def __init__(
        self,
        tasks: Iterable[TaskSpec],
        rl: RlTable,
        critic: LearnerStep,
        *,
        total_steps: int,
        seed: int,
        device: torch.device = IN_MAIN_MEMORY,
    ) -> None:
        """Build a policy for each task, which computes on `device`.

        Its learning rate is zero after `total_steps` environment steps; `critic` knows all tasks.
        """
        self.device = device
        self.rl, self.critic, self.total_steps, self.seed = rl, critic, total_steps, seed
        self.learners: dict[str, TrainedPolicy] = {}
        for task in tasks:
            self.add_policy(task)

    def add_policy(self, task: TaskSpec) -> None:
        """Add a fresh policy, unless it is known."""
        if task.policy not in self.learners:
            self.learners[task.policy] = TrainedPolicy(
                task, self.rl, total_steps=self.total_steps,
                seed=self.seed + APART * len(self.learners), device=self.device,
            )  # fmt: skip

    def version(self, policy: str) -> int:
        """Return a policy's number of updates."""
        return self._learner(policy).version

    def snapshot(self, policy: str) -> dict[str, Tensor]:
        """Return a policy's weights for actors; see `load_snapshot`."""
        learner = self._learner(policy)
        weights = prefixed("policy", learner.policy.state_dict())
        return {**weights, VERSION: torch.tensor(learner.version)}

    def learn(self, trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
        """Improve the policies of the trajectories, whose order does not matter, and the critic.

        Returns:
            Of each policy `policy_loss`, `entropy` and `kl` (of the acting policy from the
            learner's: what V-trace had to correct), both before the update, `rho` (mean clipped
            importance weight), `explained_variance` (of V-trace's targets by the values), `lr`, and
            the critic's figures, e.g. `value_loss`.

        Raises:
            ConfigError: a policy is unknown.
            DataError: rewards or values are not finite; nothing was learned.
        """
        arrived = [trajectories[i].to(self.device) for i in in_order(trajectories)]
        looks = [
            self._look(trajectory, valued)
            for trajectory, valued in zip(arrived, self.critic.values_of(arrived), strict=True)
        ]
        by_policy: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(t.policy for t in arrived):
            mine = [look for look in looks if look.policy == name]
            by_policy[name] = self._improve(self._learner(name), mine)
        for name, stats in by_policy.items():
            self._learner(name).end([t for t in arrived if t.policy == name], stats)
        taught = self.critic.learn(arrived, targets=[look.targets for look in looks])
        return {name: {**taught.get(name, {}), **stats} for name, stats in by_policy.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, the critic's part included."""
        state = prefixed("critic", self.critic.state_dict())
        for number, learner in enumerate(self.learners.values()):
            state |= prefixed(str(number), learner.state_dict())
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the result of `state_dict`; the policies MUST be the same, in the same order.

        Raises:
            CheckpointCorrupt: it belongs to other networks.
        """
        self.critic.load_state_dict(parts_of(state, "critic"))
        for number, learner in enumerate(self.learners.values()):
            learner.load_state_dict(parts_of(state, str(number)))

    # -------------------------------------------------------------------------------- one update

    def _learner(self, policy: str) -> TrainedPolicy:
        if policy not in self.learners:
            raise unknown("policy of a trajectory", policy, self.learners)
        return self.learners[policy]

    @torch.no_grad()
    def _look(self, trajectory: Trajectory, valued: ValuedTrajectory) -> PolicySnapshot:
        """Correct a trajectory to its policy before the update."""
        learner = self._learner(trajectory.policy)
        batch = OffPolicyBatch.of(trajectory, valued.to(self.device), learner.policy)
        chances = learner.policy.over(batch.prepared, batch.hidden, batch.steps.ended)
        log_ratios = chances.log_probability(batch.actions) - batch.before
        targets, advantages = self._vtrace(learner, batch, log_ratios)
        learner.check_advantages(advantages)
        return PolicySnapshot(
            policy=trajectory.policy, batch=batch, log_ratios=log_ratios, targets=targets,
            entropy=chances.entropy(),
        )  # fmt: skip

    def _improve(self, learner: TrainedPolicy, looks: list[PolicySnapshot]) -> dict[str, float]:
        """Do the gradient steps of one policy; return the update's figures."""
        rate = learner.begin()
        losses = [
            self._step(learner, look.batch.columns(part))
            for _ in range(self.rl.epochs)
            for look in looks
            for part in self._parts(learner, look.batch)
        ]
        log_ratios = torch.cat([look.log_ratios.flatten() for look in looks])
        values = torch.cat([look.batch.steps.values.flatten() for look in looks])
        targets = torch.cat([look.targets.flatten() for look in looks])
        return {
            "policy_loss": float(torch.stack(losses).mean()),
            "entropy": float(torch.cat([look.entropy.flatten() for look in looks]).mean()),
            "kl": float(approximate_divergence(log_ratios).mean()),
            "rho": float(log_ratios.exp().clamp(max=self.rl.rho_clip).mean()),
            "explained_variance": float(explained_variance(values, targets)),
            "lr": rate,
        }

    def _parts(self, learner: TrainedPolicy, batch: OffPolicyBatch) -> Sequence[Tensor]:
        """Return the columns of each minibatch, in random order."""
        order = torch.randperm(batch.count, generator=learner.generator)
        return order.to(self.device).tensor_split(max(1, min(self.rl.minibatches, batch.count)))

    def _step(self, learner: TrainedPolicy, part: OffPolicyBatch) -> Tensor:
        chances = learner.policy.over(part.prepared, part.hidden, part.steps.ended)
        log_probabilities = chances.log_probability(part.actions)
        with torch.no_grad():
            _, advantages = self._vtrace(learner, part, log_probabilities - part.before)
            advantages = advantages / (advantages.std(correction=0) + SMALLEST_DEVIATION)
        loss = policy_gradient_loss(log_probabilities, advantages).mean()
        policy_loss = loss.detach()
        if self.rl.entropy:
            loss = loss - self.rl.entropy * chances.entropy().mean()
        learner.descend(loss)
        return policy_loss

    def _vtrace(
        self, learner: TrainedPolicy, batch: OffPolicyBatch, log_ratios: Tensor
    ) -> tuple[Tensor, Tensor]:
        return vtrace(
            log_ratios, batch.steps, gamma=learner.task.gamma,
            lam=self.rl.gae_lambda, rho_clip=self.rl.rho_clip, c_clip=self.rl.c_clip,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySnapshot:
    """A trajectory with the log ratios and targets of its policy before an update."""

    policy: str
    batch: OffPolicyBatch
    log_ratios: Tensor
    """ln π - ln μ, [T, B]."""
    targets: Tensor
    """V-trace's targets of the values, [T, B]."""
    entropy: Tensor
    """[T, B]."""


def load_snapshot(policy: Policy, snapshot: Mapping[str, Tensor]) -> int:
    """Load the result of `ImpalaLearner.snapshot` into an actor's policy; return its version.

    Raises:
        CheckpointCorrupt: it belongs to another network.
    """
    load_module(policy, parts_of(snapshot, "policy"), what="the policy that the learner sent")
    return int(snapshot[VERSION])
