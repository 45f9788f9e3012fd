"""Proximal policy optimisation of one policy, by values that somebody else knows.

Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347), with generalised
advantage estimation.

Differs from the paper:
  * policy and value share nothing: the critic learns elsewhere, from everybody's experience;
  * advantages are standardised once over the whole rollout, not over each minibatch;
  * gradients are clipped by their norm and the learning rate falls to zero, as is usual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.rl.advantage import gae
from atoll.rl.batch import Batch
from atoll.rl.losses import (
    approximate_divergence,
    clipped_policy_loss,
    clipped_share,
    explained_variance,
    standardised,
)
from atoll.rl.trained_policy import TrainedPolicy
from atoll.rl.trajectory import Trajectory
from atoll.rl.values import Valued


class Ppo(TrainedPolicy):
    """One policy and what makes it better."""

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
        advantages, targets = gae(
            trajectory.rewards, valued.values[:-1],
            trajectory.next_values(valued.values, valued.cut_values),
            trajectory.terminated, trajectory.ended,
            gamma=self.task.gamma, lam=self.rl.gae_lambda,
        )  # fmt: skip
        self.check_advantages(advantages)
        batch = self._batch(trajectory, standardised(advantages))
        rate = self.begin()
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
        self.end([trajectory], told)
        return told

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
        # Shuffling all at once and cutting views is a fourth of the copies of picking each part.
        shuffled = batch.picked(torch.randperm(batch.items, generator=self.generator))
        for part in shuffled.split(self.rl.minibatches):
            chances = self.policy.over(part.prepared, part.hidden, part.ended)
            log_ratios = chances.log_probability(part.actions) - part.before
            loss = clipped_policy_loss(log_ratios, part.advantages, clip=self.rl.clip).mean()
            losses.append(loss.detach())
            if self.rl.entropy:
                loss = loss - self.rl.entropy * chances.entropy().mean()
            self.descend(loss)

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
