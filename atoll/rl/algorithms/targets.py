"""What the critic regresses: each policy's own GAE returns, or V-trace over everybody's.

Experience with its values, column by column: what can be corrected to another policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from atoll.rl.algorithms.losses import gae, vtrace
from atoll.rl.nets.policy import Policy
from atoll.rl.trajectory import Trajectory, ValuedTrajectory


class Evaluates(Protocol):
    """A policy as far as it is asked how likely it finds what another one did."""

    def evaluate(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [T, B] of the actions, and the entropy [T, B]."""
        ...


@dataclass(frozen=True, slots=True)
class Targets:
    """One trajectory as experience of one policy: whose value, from what, which targets."""

    trajectory: Trajectory
    policy: str
    """Whose value is learned; with `corrected` not always the one that acted."""
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

    Trajectories of one length are walked side by side: the loop over steps is what costs.

    Args:
        trajectories: Whose they are does not matter, each is bootstrapped from its own values.
        valued: The values of each.
        gammas: Discount of each policy.
        lam: Lambda.
    """
    out: list[Tensor | None] = [None] * len(trajectories)
    for length in sorted({len(t.rewards) for t in trajectories}):
        chosen = [i for i, t in enumerate(trajectories) if len(t.rewards) == length]
        some = [trajectories[i] for i in chosen]
        widths = [t.rewards.shape[1] for t in some]
        gamma = torch.cat([
            torch.full((width,), gammas[t.policy])
            for width, t in zip(widths, some, strict=True)
        ])  # fmt: skip
        following = [
            t.next_values(valued[i].values, valued[i].cut_values)
            for i, t in zip(chosen, some, strict=True)
        ]
        _, targets = gae(
            torch.cat([t.rewards for t in some], 1),
            torch.cat([valued[i].values[:-1] for i in chosen], 1),
            torch.cat(following, 1),
            torch.cat([t.terminated for t in some], 1),
            torch.cat([t.ended for t in some], 1),
            gamma=gamma,
            lam=lam,
        )
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
    """Return the V-trace targets [T, B] of one trajectory for the policy whose value is learned.

    Args:
        trajectory: Lived by any policy of the same task; its log-probabilities are that one's.
        valued: The values of the learned policy there.
        policy: The learned policy as it is now; None: the one that acted is taken for it.
        gamma: Discount of the learned policy.
        lam: Lambda.
        rho_clip: Largest importance weight.
        c_clip: Largest trace coefficient.
    """
    acted = trajectory.log_probabilities
    ratios = torch.zeros_like(acted) if policy is None else policy.evaluate(trajectory)[0] - acted
    targets, _ = vtrace(
        ratios,
        trajectory.rewards,
        valued.values[:-1],
        trajectory.next_values(valued.values, valued.cut_values),
        trajectory.terminated,
        trajectory.ended,
        gamma=gamma,
        lam=lam,
        rho_clip=rho_clip,
        c_clip=c_clip,
    )
    return targets


@dataclass(slots=True, frozen=True, kw_only=True)
class OffPolicyBatch:
    """T steps of B columns, the first two axes of everything but `hidden`."""

    prepared: Tensor
    """Observations as the policy's layers take them."""
    actions: Tensor
    before: Tensor
    """ln μ of the actions, by the policy that acted."""
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    ended: Tensor
    hidden: Tensor | None
    """[B, H], what a recurrent policy remembered before the first step."""

    @classmethod
    def of(cls, trajectory: Trajectory, valued: ValuedTrajectory, policy: Policy) -> OffPolicyBatch:
        """Return a trajectory as such a batch, its observations prepared for `policy`."""
        with torch.no_grad():
            prepared = policy.prepared(trajectory.observations[:-1])
        return cls(
            prepared=prepared, actions=trajectory.actions, before=trajectory.log_probabilities,
            rewards=trajectory.rewards, values=valued.values[:-1],
            next_values=trajectory.next_values(valued.values, valued.cut_values),
            terminated=trajectory.terminated, ended=trajectory.ended, hidden=trajectory.hidden,
        )  # fmt: skip

    @property
    def count(self) -> int:
        """How many columns it has."""
        return self.rewards.shape[1]

    def columns(self, which: Tensor) -> OffPolicyBatch:
        """Return it with these columns only, by their numbers."""
        parts: dict[str, Tensor | None] = {}
        for field in fields(self):
            whole: Tensor | None = getattr(self, field.name)
            axis = 0 if field.name == "hidden" else 1
            parts[field.name] = None if whole is None else whole.index_select(axis, which)
        return OffPolicyBatch(**parts)  # type: ignore[arg-type]
