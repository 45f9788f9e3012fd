"""The critic's targets: GAE returns of each policy, or V-trace over all policies' experience."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from atoll.rl.algorithms.losses import gae, vtrace
from atoll.rl.nets.policy import Policy
from atoll.rl.trajectory import Trajectory, ValuedSteps, ValuedTrajectory


class Evaluates(Protocol):
    """The part of a policy that computes the probability of given actions."""

    def evaluate(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [T, B] of the actions, and the entropy [T, B]."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """Targets of one policy's values on one trajectory."""

    trajectory: Trajectory
    policy: str
    """The policy to value; with `corrected` it may differ from the one that acted."""
    targets: Tensor
    """[T, B], in reward units."""


def own_targets(
    trajectories: Sequence[Trajectory],
    valued: Sequence[ValuedTrajectory],
    *,
    gammas: Mapping[str, float],
    lam: float,
) -> list[Tensor]:
    """Return the GAE(lambda) returns of each trajectory, [T, B] each.

    Trajectories of one length are computed side by side, because the loop over steps dominates.

    Each is bootstrapped from its own values in `valued`; `gammas` are by policy.
    """
    out: list[Tensor | None] = [None] * len(trajectories)
    for length in sorted({len(t.rewards) for t in trajectories}):
        chosen = [i for i, t in enumerate(trajectories) if len(t.rewards) == length]
        some = [trajectories[i] for i in chosen]
        widths = [t.rewards.shape[1] for t in some]
        gamma = torch.cat([
            torch.full((width,), gammas[t.policy], device=t.rewards.device)
            for width, t in zip(widths, some, strict=True)
        ])  # fmt: skip
        steps = [
            t.with_values(valued[i].values, valued[i].cut_values)
            for i, t in zip(chosen, some, strict=True)
        ]
        together = ValuedSteps(*(torch.cat(parts, 1) for parts in zip(*steps, strict=True)))
        _, targets = gae(together, gamma=gamma, lam=lam)
        for i, part in zip(chosen, torch.split(targets, widths, dim=1), strict=True):
            out[i] = part
    return [part for part in out if part is not None]


@torch.no_grad()
def corrected_targets(
    trajectory: Trajectory,
    valued: ValuedTrajectory,
    *,
    policy: Evaluates | None,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> Tensor:
    """Return the V-trace targets [T, B] of one trajectory for the learned policy's values.

    Args:
        trajectory: Experience of any policy of the same task, with its log-probabilities.
        valued: The values of the learned policy there.
        policy: The learned policy; None if it is the one that acted.
        gamma: Discount of the learned policy.
        lam: Lambda.
        rho_clip: Largest importance weight.
        c_clip: Largest trace coefficient.
    """
    acted = trajectory.log_probabilities
    ratios = torch.zeros_like(acted) if policy is None else policy.evaluate(trajectory)[0] - acted
    targets, _ = vtrace(
        ratios,
        trajectory.with_values(valued.values, valued.cut_values),
        gamma=gamma,
        lam=lam,
        rho_clip=rho_clip,
        c_clip=c_clip,
    )
    return targets


@dataclass(slots=True, frozen=True, kw_only=True)
class OffPolicyBatch:
    """T steps of B columns for an off-policy update; `hidden` alone has no axis T."""

    prepared: Tensor
    """Observations as the policy's layers take them."""
    actions: Tensor
    before: Tensor
    """ln μ of the actions, by the policy that acted."""
    steps: ValuedSteps
    hidden: Tensor | None
    """[B, H], the state of a recurrent policy before the first step."""

    @classmethod
    def of(cls, trajectory: Trajectory, valued: ValuedTrajectory, policy: Policy) -> OffPolicyBatch:
        """Return a trajectory as a batch, its observations prepared for `policy`."""
        with torch.no_grad():
            prepared = policy.prepared(trajectory.observations[:-1])
        return cls(
            prepared=prepared, actions=trajectory.actions, before=trajectory.log_probabilities,
            steps=trajectory.with_values(valued.values, valued.cut_values),
            hidden=trajectory.hidden,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Number of columns."""
        return self.actions.shape[1]

    def columns(self, which: Tensor) -> OffPolicyBatch:
        """Return these columns of the batch."""
        return OffPolicyBatch(
            prepared=self.prepared.index_select(1, which),
            actions=self.actions.index_select(1, which),
            before=self.before.index_select(1, which),
            steps=ValuedSteps(*(part.index_select(1, which) for part in self.steps)),
            hidden=None if self.hidden is None else self.hidden.index_select(0, which),
        )
