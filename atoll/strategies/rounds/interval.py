"""The interval between rounds, which the hub may change while a job runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atoll.wire.messages import Verdict

KEY = "shared.interval"


class Interval:
    """The interval that replaces the one of the options, and the step from which it counts."""

    def __init__(self) -> None:
        """The options hold until a verdict says otherwise."""
        self.since, self.every = 0, 0

    def due_after(self, step: int, otherwise: Callable[[int], int]) -> int:
        """Return the step of the next round; `otherwise` is that of the options."""
        if not self.every:
            return otherwise(step)
        return self.since + ((step - self.since) // self.every + 1) * self.every

    def follow(self, verdict: Verdict, *, step: int) -> None:
        """Take the interval of a verdict: all members apply it after the same round."""
        if verdict.every and verdict.every != self.every:
            self.since, self.every = step, verdict.every

    def state(self) -> dict[str, Tensor]:
        """Return the state for joining members; empty while the options hold."""
        return {KEY: torch.tensor([self.since, self.every])} if self.every else {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        known = state.get(KEY)
        self.since, self.every = (0, 0) if known is None else map(int, known.tolist())
