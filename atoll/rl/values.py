"""Where an actor gets the values of what it saw: its own critic, a pooled one, or a service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.rl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Valued:
    """The values of one trajectory, in the units of its rewards."""

    values: Tensor
    """[T + 1, B]."""
    cut_values: Tensor
    """[K]."""
    version: int
    """Updates of the critic they come from; 0: it has not learned anything yet."""


class Values(Protocol):
    """Answers what states are worth."""

    def of(self, trajectory: Trajectory) -> Valued:
        """Return the values of everything in a trajectory.

        Raises:
            DeadlineExceeded: a service did not answer in time.
        """
        ...
