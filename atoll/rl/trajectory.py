"""The experience of an actor between two updates, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from atoll.errors import DataError


class ValuedSteps(NamedTuple):
    """Rewards and values of T steps of B columns, each [T, B], for GAE, n-step and V-trace."""

    rewards: Tensor
    values: Tensor
    """V(s_t)."""
    next_values: Tensor
    """V of what followed step t: the next state, or the last one of a truncated episode."""
    terminated: Tensor
    """Nothing followed: the bootstrapped value counts as zero."""
    ended: Tensor
    """Terminated or truncated: nothing flows back from step t + 1, which is another episode's."""


@dataclass(slots=True)
class Trajectory:
    """T steps of B columns; a column is one copy of the environment, or one agent in one.

    When an episode ends at step t, `observations[t + 1]` is the first of the next episode. If it
    was truncated, the last observation of the old episode is in `cut_observations`, to bootstrap
    from. Observations are as the environment returns them, not normalized.
    """

    policy: str
    """The policy that acted."""
    observations: Tensor
    """[T + 1, B, *shape], float32."""
    actions: Tensor
    """[T, B, width]: int64 for discrete ones, float32 for continuous ones."""
    log_probabilities: Tensor
    """[T, B], float32: of the actions, under the policy that acted."""
    rewards: Tensor
    """[T, B], float32."""
    terminated: Tensor
    """[T, B], bool: the episode ended; the value after it is 0."""
    truncated: Tensor
    """[T, B], bool: the episode was cut off and its value is bootstrapped; never if terminated."""
    cut_at: Tensor
    """[K, 2], int64: step and column of each truncation, in order of steps, then columns."""
    cut_observations: Tensor
    """[K, *shape], float32: the observation there, before the reset."""
    states: Tensor | None = None
    """[T + 1, B, *state], float32: the joint state at each step, for a centralised critic."""
    cut_states: Tensor | None = None
    """[K, *state]."""
    hidden: Tensor | None = None
    """[B, H]: the state of a recurrent policy before the first step."""
    scale: tuple[Tensor, Tensor] | None = None
    """Mean and deviation, each [*shape], with which the actor normalized observations."""
    sequence: int = 0
    """Number among the actor's trajectories, from 1."""
    actor: str = ""
    """The actor, e.g. `w1`; with `sequence` it identifies the trajectory."""
    policy_version: int = 0
    """Number of updates of the policy that acted."""
    value_version: int = 0
    """Number of updates of the critic that the actor used."""
    returns: list[float] = field(default_factory=list)
    """Undiscounted returns of the episodes that ended in it."""

    def to(self, device: torch.device) -> Trajectory:
        """Return it with its tensors on a device; itself if they are there."""
        if self.rewards.device == device:
            return self
        parts: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, Tensor):
                parts[part.name] = value.to(device)
        if self.scale is not None:
            parts["scale"] = (self.scale[0].to(device), self.scale[1].to(device))
        return replace(self, **parts)

    @property
    def steps(self) -> int:
        """Environment steps: T times the columns (each agent counts)."""
        return self.rewards.numel()

    @property
    def ended(self) -> Tensor:
        """[T, B], bool: where an episode ended, for any reason."""
        return self.terminated | self.truncated

    def with_values(self, values: Tensor, cut_values: Tensor) -> ValuedSteps:
        """Return the steps with the values before and after each of them.

        `values` [T + 1, B] are of `observations`, `cut_values` [K] of `cut_observations`.
        """
        following = values[1:].clone()
        if len(self.cut_at):
            following[self.cut_at[:, 0], self.cut_at[:, 1]] = cut_values
        return ValuedSteps(self.rewards, values[:-1], following, self.terminated, self.ended)

    def check(self) -> Trajectory:
        """Return itself if its shapes fit together and every number is finite.

        Raises:
            DataError: otherwise; the step and the column are named.
        """
        length, columns = self.rewards.shape
        observations, cuts = tuple(self.observations.shape), len(self.cut_observations)
        expected: dict[str, tuple[int, ...]] = {
            "observations": (length + 1, columns, *observations[2:]),
            "actions": (length, columns, *self.actions.shape[2:]),
            "log_probabilities": (length, columns), "terminated": (length, columns),
            "truncated": (length, columns), "cut_at": (cuts, 2),
        }  # fmt: skip
        if self.hidden is not None:
            expected["hidden"] = (columns, *self.hidden.shape[1:])
        if self.cut_states is not None:
            expected["cut_states"] = (cuts, *self.cut_states.shape[1:])
        found = {name: tuple(getattr(self, name).shape) for name in expected}
        if self.scale is not None:
            expected |= dict.fromkeys(("mean", "deviation"), observations[2:])
            found |= {"mean": tuple(self.scale[0].shape), "deviation": tuple(self.scale[1].shape)}
        for name, shape in expected.items():
            if found[name] != shape:
                raise DataError(
                    "a trajectory does not fit together",
                    given=f"{self.policy}: {name} of shape {found[name]}", expected=f"{shape}",
                )  # fmt: skip
        if self.hidden is not None and not bool(torch.isfinite(self.hidden).all()):
            raise DataError(
                "a trajectory has a recurrent state that is not finite", given=self.policy
            )
        for name in ("rewards", "observations", "log_probabilities", "actions", "states"):
            self._check_finite(name)
        self._check_finite("cut_observations")
        self._check_finite("cut_states")
        return self

    def _check_finite(self, name: str) -> None:
        tensor: Tensor | None = getattr(self, name)
        if tensor is None or not tensor.is_floating_point():
            return
        wrong = (~torch.isfinite(tensor)).nonzero()
        if len(wrong):
            at = self.cut_at[wrong[0, 0]] if name.startswith("cut_") else wrong[0, :2]
            step, column = (int(n) for n in at)
            raise DataError(
                f"a trajectory has {name} that are not finite",
                given=f"policy {self.policy}, actor {self.actor or '?'}, trajectory "
                f"{self.sequence}, step {step}, column {column}",
                expected="finite numbers",
                remedy="look at the environment; the trajectory was dropped",
            )


def batch_of(parts: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return the parts that are not None, contiguous on the CPU, for a queue."""
    return {k: v.detach().cpu().contiguous() for k, v in parts.items() if v is not None}


@dataclass(frozen=True, slots=True)
class ValuedTrajectory:
    """The values of one trajectory, in the units of its rewards."""

    values: Tensor
    """[T + 1, B]."""
    cut_values: Tensor
    """[K]."""
    version: int
    """Number of updates of their critic; 0: it has not learned yet."""

    def to(self, device: torch.device) -> ValuedTrajectory:
        """Return it with its tensors on a device."""
        return replace(self, values=self.values.to(device), cut_values=self.cut_values.to(device))


class Values(Protocol):
    """Returns the values of states."""

    def of(self, trajectory: Trajectory) -> ValuedTrajectory:
        """Return the values of a trajectory.

        Raises:
            DeadlineExceeded: a service did not answer in time.
        """
        ...
