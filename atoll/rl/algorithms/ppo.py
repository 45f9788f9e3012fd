"""PPO: proximal policy optimization of one policy, with the values of a separate critic.

Proximal Policy Optimization Algorithms (https://arxiv.org/abs/1707.06347), with generalised
advantage estimation.

Differs from the paper:
  * policy and value share nothing: the critic learns elsewhere, from all actors' experience;
  * advantages are standardised once over the whole rollout, not over each minibatch;
  * gradients are clipped by their norm and the learning rate falls to zero, as is usual.

`minibatches` serves the critic: batches in which every policy weighs the same, regardless of its
share of the experience.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.rl.algorithms.losses import (
    approximate_divergence,
    clipped_policy_loss,
    clipped_share,
    explained_variance,
    gae,
    standardised,
)
from atoll.rl.algorithms.trained_policy import IN_MAIN_MEMORY, TrainedPolicy
from atoll.rl.trajectory import Trajectory, ValuedTrajectory


def in_order(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the indices of trajectories sorted by policy, actor and sequence.

    Learning in this order makes the result independent of the order of arrival.
    """
    keys = [(t.policy, t.actor, t.sequence) for t in trajectories]
    return sorted(range(len(trajectories)), key=keys.__getitem__)


@dataclass(frozen=True, slots=True)
class Part:
    """One minibatch."""

    rows: list[Tensor]
    """For each group its rows in this minibatch, counted from the group's first."""
    weights: Tensor
    """[N] over all rows: each group's sum is equal, the total is 1."""


def minibatches(
    counts: Sequence[int], *, parts: int, generator: torch.Generator,
    device: torch.device = IN_MAIN_MEMORY,
) -> Iterator[Part]:  # fmt: skip
    """Yield a pass over all rows in `parts` minibatches, each with a share of every group.

    In each minibatch all groups have the same total weight.

    `counts` are the rows of each group; `device` is that of the result.
    """
    drawn = [torch.randperm(n, generator=generator).tensor_split(parts) for n in counts]
    for chosen in zip(*drawn, strict=True):
        rows = [part.to(device) for part in chosen]
        present = sum(1 for part in rows if len(part))
        if present:
            shares = [
                torch.full((len(p),), 1.0 / (present * max(1, len(p))), device=device) for p in rows
            ]
            yield Part(rows, torch.cat(shares))


@dataclass(slots=True, kw_only=True)
class Batch:
    """Columns of steps, [T, B, ...], or, after `flat`, single steps, [N, ...].

    A recurrent policy needs columns: its state depends on the steps before.
    """

    prepared: Tensor
    """Observations as the layers take them, [..., width]."""
    actions: Tensor
    """[..., numbers of an action]."""
    before: Tensor
    """ln π of the actions when they were taken."""
    advantages: Tensor
    hidden: Tensor | None = None
    """[B, H]: the state of a recurrent policy before the first step."""
    ended: Tensor | None = None
    """[T, B], bool: where a recurrent policy resets its state."""

    @property
    def items(self) -> int:
        """Number of steps or columns."""
        return self.before.shape[-1]

    def flat(self) -> Batch:
        """Return the batch as single steps."""
        return Batch(
            prepared=self.prepared.flatten(0, 1), actions=self.actions.flatten(0, 1),
            before=self.before.flatten(), advantages=self.advantages.flatten(),
        )  # fmt: skip

    def picked(self, order: Tensor) -> Batch:
        """Return the items of these indices, in this order."""
        axis = self.before.dim() - 1
        return Batch(
            prepared=self.prepared.index_select(axis, order),
            actions=self.actions.index_select(axis, order),
            before=self.before.index_select(axis, order),
            advantages=self.advantages.index_select(axis, order),
            hidden=None if self.hidden is None else self.hidden.index_select(0, order),
            ended=None if self.ended is None else self.ended.index_select(axis, order),
        )

    def split(self, count: int) -> Iterator[Batch]:
        """Yield `count` non-empty parts of nearly equal size, as views."""
        axis, count = self.before.dim() - 1, max(1, min(count, self.items))
        hidden = [None] * count if self.hidden is None else self.hidden.tensor_split(count)
        ended = [None] * count if self.ended is None else self.ended.tensor_split(count, axis)
        parts = (self.prepared, self.actions, self.before, self.advantages)
        for prepared, actions, before, advantages, memory, ends in zip(
            *(part.tensor_split(count, axis) for part in parts), hidden, ended, strict=True
        ):
            yield Batch(
                prepared=prepared, actions=actions, before=before, advantages=advantages,
                hidden=memory, ended=ends,
            )  # fmt: skip


class Ppo(TrainedPolicy):
    """One policy trained by PPO."""

    def improve(self, trajectory: Trajectory, valued: ValuedTrajectory) -> dict[str, float]:
        """Do one update; return its figures.

        Returns:
            `policy_loss` (mean over all minibatches), `kl` (of the policy before from the one
            after), `clip_fraction`, `entropy` (after), `explained_variance` (of GAE's targets by
            the values), `epochs` done and `lr`.

        Raises:
            DataError: rewards or values are not finite; nothing was learned.
            LossNotFinite: the update made parameters not finite.
        """
        device = self.policy.device
        trajectory, valued = trajectory.to(device), valued.to(device)
        advantages, targets = gae(
            trajectory.with_values(valued.values, valued.cut_values),
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
        stats = self._after(batch)
        stats["policy_loss"] = float(torch.stack(losses).mean())
        stats["explained_variance"] = float(explained_variance(valued.values[:-1], targets))
        stats |= {"epochs": float(epochs), "lr": rate}
        self.end([trajectory], stats)
        return stats

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
        """Go once over the batch in random order, with an optimizer step per minibatch."""
        # Shuffling once and slicing views takes a fourth of the time of indexing each minibatch.
        order = torch.randperm(batch.items, generator=self.generator)
        shuffled = batch.picked(order.to(self.policy.device))
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
        """Return how far the policy has moved from the one that acted."""
        chances = self.policy.over(batch.prepared, batch.hidden, batch.ended)
        log_ratios = chances.log_probability(batch.actions) - batch.before
        return {
            "kl": float(approximate_divergence(log_ratios).mean()),
            "clip_fraction": float(clipped_share(log_ratios, clip=self.rl.clip)),
            "entropy": float(chances.entropy().mean()),
        }
