"""Experience with its values, column by column: what can be corrected to another policy."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from atoll.rl.policy import Policy
from atoll.rl.trajectory import Trajectory
from atoll.rl.values import Valued


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
    def of(cls, trajectory: Trajectory, valued: Valued, policy: Policy) -> OffPolicyBatch:
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
