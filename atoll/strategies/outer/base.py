"""What most outer strategies do not need to say.

The step of methods that are optimizers themselves: rate and decay are the inner optimizer's.

The learning rate for a batch that is as many times larger as there are members.

Goyal et al. 2017, "Accurate, Large Minibatch SGD" (https://arxiv.org/abs/1706.02677), section 2.1
and 2.2: n times the batch wants n times the rate with SGD, reached gradually; with Adam sqrt(n)
(Malladi et al. 2022, https://arxiv.org/abs/2205.10287). The rate is changed around the optimizer's
own step and put back, so that schedulers, which may compute the next rate from the current one,
never see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.strategies.base import SyncResult
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task

SHARED_STATE = "shared."
"""Start of the keys of a strategy's state that are equal on every member after a round."""


class OuterDefaults:
    """The parts of :class:`Outer` that have an ordinary answer."""

    shared_steps = 0
    one_model = True
    one_state = True
    inherits = True

    def gradients(self, task: Task) -> None:
        """Do nothing: gradients stay local."""

    def sync(self, task: Task) -> SyncResult | None:
        """Do nothing: parameters are not combined after a step."""
        return None

    def finish(self, task: Task) -> SyncResult | None:
        """Do nothing: every step was agreed on."""
        return None

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Leave the model as it is: members carry what they agreed on."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state; see :meth:`Outer.state_dict`."""
        return {}

    def shared_state(self) -> dict[str, Tensor]:
        """Return the part of the state that a newcomer takes over; waits for nothing."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if key.startswith(SHARED_STATE)}


@contextmanager
def as_carrier(flat: Flat, vector: Tensor) -> Iterator[None]:
    """Put a vector into a model's tensors inside; afterwards they are as before."""
    before = flat.read()
    flat.write(vector)
    try:
        yield
    finally:
        flat.write(before)


@torch.no_grad()
def own_step(task: Task, flat: Flat, direction: Tensor, *, decay: bool = True) -> None:
    """Take `theta = (1 - lr * weight_decay) * theta - lr * direction`, and leave no gradients.

    The inner optimizer's groups say `lr` and `weight_decay`, so schedules hold. It finds nothing to
    do afterwards: a parameter without a gradient is left alone, by clipping too.

    Args:
        task: Its parameters are moved, and their gradients taken away.
        flat: The parameters.
        direction: One flat vector, in the order of `flat`.
        decay: Whether to shrink the parameters by `weight_decay`.
    """
    by_tensor = dict(zip(map(id, flat.tensors), flat.views(direction), strict=True))
    for group in task.optimizer.param_groups:
        rate = float(group["lr"])
        shrink = rate * float(group.get("weight_decay", 0.0)) if decay else 0.0
        for parameter in group["params"]:
            part = by_tensor.get(id(parameter))
            if part is None:
                continue
            if shrink:
                parameter.mul_(1.0 - shrink)
            parameter.add_(part.to(parameter.device, parameter.dtype), alpha=-rate)
            parameter.grad = None


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
