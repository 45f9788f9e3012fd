"""Proximal policy optimisation of one policy, by values that somebody else knows.

Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347), with generalised
advantage estimation.

Differs from the paper:
  * policy and value share nothing: the critic learns elsewhere, from everybody's experience;
  * advantages are standardised once over the whole rollout, not over each minibatch;
  * gradients are clipped by their norm and the learning rate falls to zero, as is usual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.config.rl_tables import RlTable
from atoll.errors import DataError, LossNotFinite
from atoll.rl.advantage import gae
from atoll.rl.batch import Batch
from atoll.rl.losses import (
    approximate_divergence,
    clipped_policy_loss,
    clipped_share,
    explained_variance,
    standardised,
)
from atoll.rl.optimizer import (
    adam,
    annealed,
    load_optimizer_tensors,
    optimizer_tensors,
    set_rate,
)
from atoll.rl.policy import Policy
from atoll.rl.spaces import TaskSpec
from atoll.rl.state import load_module, parts_of, prefixed
from atoll.rl.trajectory import Trajectory
from atoll.rl.values import Valued


class Ppo:
    """One policy and what makes it better."""

    def __init__(self, task: TaskSpec, rl: RlTable, *, total_steps: int, seed: int) -> None:
        """Build the policy of a task.

        Args:
            task: Whose policy.
            rl: Every number of the algorithm.
            total_steps: Environment steps at whose end the learning rate is zero.
            seed: Of the weights it starts from and of the order of minibatches.
        """
        self.task, self.rl, self.total_steps = task, rl, total_steps
        self.generator = torch.Generator().manual_seed(seed)
        self.policy = Policy.build(task, rl, generator=self.generator)
        self.optimizer: Optimizer = adam(self.policy.parameters(), lr=rl.lr)
        self.version = 0
        """Updates so far."""
        self.steps = 0
        """Environment steps learned from so far."""

    def improve(self, trajectory: Trajectory, valued: Valued) -> dict[str, float]:
        """Do one update; return what can be told about it.

        Returns:
            `policy_loss` (mean over all minibatches), `kl` (of the policy before from the one
            after), `clip_fraction`, `entropy` (after), `explained_variance` (of the values against
            GAE's targets), `epochs` done and `lr`.

        Raises:
            DataError: rewards or values are not finite; nothing was learned.
            LossNotFinite: the update made the policy so.
        """
        advantages, targets = self._advantages(trajectory, valued)
        batch = self._batch(trajectory, standardised(advantages))
        rate = annealed(self.rl.lr, done=self.steps, total=self.total_steps, anneal=self.rl.anneal)
        set_rate(self.optimizer, rate)
        losses: list[Tensor] = []
        epochs = 0
        while epochs < self.rl.epochs:
            self._pass(batch, losses)
            epochs += 1
            if self.rl.target_kl > 0 and self._after(batch)["kl"] > self.rl.target_kl:
                break
        told = self._after(batch)
        told["policy_loss"] = float(torch.stack(losses).mean())
        told["explained_variance"] = float(explained_variance(valued.values[:-1], targets))
        told |= {"epochs": float(epochs), "lr": rate}
        if not all(math.isfinite(value) for value in told.values()):
            raise LossNotFinite(
                "an update of a policy went to numbers that are not finite",
                given=f"policy {self.task.policy}, update {self.version + 1}: {told}",
                remedy="lower lr or max_norm in [rl], or normalise observations",
            )
        if self.policy.norm is not None:
            self.policy.norm.update(trajectory.observations[:-1])
        self.version += 1
        self.steps += trajectory.steps
        return told

    # ------------------------------------------------------------------------------- one update

    def _advantages(self, trajectory: Trajectory, valued: Valued) -> tuple[Tensor, Tensor]:
        advantages, targets = gae(
            trajectory.rewards, valued.values[:-1],
            trajectory.next_values(valued.values, valued.cut_values),
            trajectory.terminated, trajectory.ended,
            gamma=self.task.gamma, lam=self.rl.gae_lambda,
        )  # fmt: skip
        wrong = (~torch.isfinite(advantages)).nonzero()
        if len(wrong):
            # The advantage carries it back in time: the last step of a column is where it is from.
            step, column = (int(n) for n in wrong[-1])
            raise DataError(
                "rewards or values are not finite",
                given=f"policy {self.task.policy}, step {step}, column {column}: reward "
                f"{float(trajectory.rewards[step, column])}, value "
                f"{float(valued.values[step, column])} of version {valued.version}",
                expected="finite numbers",
                remedy="the trajectory was left out; look at the environment and the critic",
            )
        return advantages, targets

    @torch.no_grad()
    def _batch(self, trajectory: Trajectory, advantages: Tensor) -> Batch:
        batch = Batch(
            prepared=self.policy.prepared(trajectory.observations[:-1]),
            actions=trajectory.actions, before=trajectory.log_probabilities, advantages=advantages,
        )  # fmt: skip
        if not self.policy.recurrent:
            return batch.flat()
        hidden = trajectory.hidden
        batch.hidden = self.policy.initial(batch.items) if hidden is None else hidden
        batch.ended = trajectory.ended
        return batch

    def _pass(self, batch: Batch, losses: list[Tensor]) -> None:
        """Go once over the batch in random order, a step of the optimizer per minibatch."""
        shuffled = batch.picked(torch.randperm(batch.items, generator=self.generator))
        for part in shuffled.split(self.rl.minibatches):
            chances = self.policy.over(part.prepared, part.hidden, part.ended)
            log_ratios = chances.log_probability(part.actions) - part.before
            loss = clipped_policy_loss(log_ratios, part.advantages, clip=self.rl.clip).mean()
            losses.append(loss.detach())
            if self.rl.entropy:
                loss = loss - self.rl.entropy * chances.entropy().mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.policy.parameters(), self.rl.max_norm)
            self.optimizer.step()

    @torch.no_grad()
    def _after(self, batch: Batch) -> dict[str, float]:
        """Return how far the policy has come from the one that acted."""
        chances = self.policy.over(batch.prepared, batch.hidden, batch.ended)
        log_ratios = chances.log_probability(batch.actions) - batch.before
        return {
            "kl": float(approximate_divergence(log_ratios).mean()),
            "clip_fraction": float(clipped_share(log_ratios, clip=self.rl.clip)),
            "entropy": float(chances.entropy().mean()),
        }

    # ------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that the next update depends on, as tensors alone."""
        return {
            **prefixed("policy", self.policy.state_dict()),
            **prefixed("optimizer", optimizer_tensors(self.optimizer)),
            "generator": self.generator.get_state(),
            "version": torch.tensor(self.version),
            "steps": torch.tensor(self.steps),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` returned.

        Raises:
            CheckpointCorrupt: it is of another network.
        """
        policy = f"policy {self.task.policy}"
        load_module(self.policy, parts_of(state, "policy"), what=policy)
        load_optimizer_tensors(self.optimizer, parts_of(state, "optimizer"))
        self.generator.set_state(state["generator"])
        self.version, self.steps = int(state["version"]), int(state["steps"])
