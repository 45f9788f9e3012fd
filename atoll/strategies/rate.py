"""The learning rate for a batch that is as many times larger as there are members.

Goyal et al. 2017, "Accurate, Large Minibatch SGD" (https://arxiv.org/abs/1706.02677), section 2.1
and 2.2: n times the batch wants n times the rate with SGD, reached gradually; with Adam sqrt(n)
(Malladi et al. 2022, https://arxiv.org/abs/2205.10287). The rate is changed around the optimizer's
own step and put back, so that schedulers, which may compute the next rate from the current one,
never see it.
"""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

SCALINGS = ("none", "linear", "sqrt")
"""How the rate grows with the number of members."""


class ScaledRate:
    """Multiplies an optimizer's learning rates by a factor, during its step only."""

    def __init__(self, scaling: str, *, warmup: int) -> None:
        """Scale by `none`, `linear` or `sqrt`; the factor is reached after `warmup` steps."""
        self._scaling, self._warmup = scaling, warmup
        self.factor = 1.0
        """Of the next step."""
        self._before: list[Any] = []

    def set(self, members: int, *, step: int) -> None:
        """Take note of how many members the next step's gradients come from.

        Args:
            members: Their number.
            step: Steps of the schedule done before, 0 for the first.
        """
        whole = {"none": 1.0, "linear": float(members), "sqrt": math.sqrt(members)}[self._scaling]
        reached = min(1.0, (step + 1) / (self._warmup + 1))
        self.factor = 1.0 + (whole - 1.0) * reached

    def attach(self, optimizer: Optimizer) -> None:
        """Surround the steps of an optimizer."""
        if self._scaling != "none":
            optimizer.register_step_pre_hook(self._enlarge)
            optimizer.register_step_post_hook(self._restore)

    def _enlarge(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._before, strict=True):
            group["lr"] = rate
