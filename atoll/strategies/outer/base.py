"""Defaults of outer strategies, the step of a method's own optimizer, and learning-rate scaling.

With n members the batch is n times larger. SGD then takes n times the learning rate, reached by a
warm-up (Goyal et al. 2017, "Accurate, Large Minibatch SGD", https://arxiv.org/abs/1706.02677,
sections 2.1 and 2.2); Adam takes sqrt(n) times (Malladi et al. 2022,
https://arxiv.org/abs/2205.10287). The rate is scaled around the optimizer's step and restored after
it, because a scheduler may compute the next rate from the current one.
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
from atoll.strategies.vectors.flat import Flat, real_view
from atoll.task import Task

SHARED_STATE = "shared."
"""Prefix of the state keys that are equal on every member after a round."""


class OuterDefaults:
    """Default implementations of :class:`Outer`."""

    shared_steps = 0
    one_model = True
    one_state = True
    inherits = True
    can_grow = True
    goes_on = False

    def gradients(self, task: Task) -> None:
        """Do nothing: gradients stay local."""

    def sync(self, task: Task) -> SyncResult | None:
        """Do nothing: parameters are not combined after a step."""
        return None

    def finish(self, task: Task) -> SyncResult | None:
        """Do nothing: there are no steps to agree on."""
        return None

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Do nothing: the model holds the agreed parameters."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state; see :meth:`Outer.state_dict`."""
        return {}

    def shared_state(self) -> dict[str, Tensor]:
        """Return the part of the state that a joining member loads; never waits."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if key.startswith(SHARED_STATE)}


@contextmanager
def as_carrier(flat: Flat, vector: Tensor) -> Iterator[None]:
    """Load a vector into the model's tensors, and restore them bit for bit on exit."""
    before = flat.copies()
    flat.write(vector)
    try:
        yield
    finally:
        flat.restore(before)


@torch.no_grad()
def own_step(task: Task, flat: Flat, direction: Tensor, *, decay: bool = True) -> None:
    """Take the step `theta = (1 - lr * weight_decay) * theta - lr * direction` and clear gradients.

    `lr` and `weight_decay` come from the inner optimizer's groups, so schedulers keep working. The
    inner optimizer's own step then changes nothing: it skips parameters without a gradient.

    Args:
        task: Its parameters are updated and their gradients set to None.
        flat: The parameters.
        direction: One flat vector in the order of `flat`.
        decay: Whether to apply `weight_decay`.
    """
    by_tensor = dict(zip(map(id, flat.tensors), flat.views(direction), strict=True))
    for group in task.optimizer.param_groups:
        rate = float(group["lr"])
        shrink = rate * float(group.get("weight_decay", 0.0)) if decay else 0.0
        for parameter in group["params"]:
            part = by_tensor.get(id(parameter))
            if part is None:
                continue
            value = real_view(parameter)
            if shrink:
                value.mul_(1.0 - shrink)
            value.add_(part.to(value.device, value.dtype), alpha=-rate)
            parameter.grad = None


SCALINGS = ("none", "linear", "sqrt")
"""How the learning rate grows with the number of members."""


class ScaledRate:
    """Scale an optimizer's learning rates during its step only."""

    def __init__(self, scaling: str, *, warmup: int) -> None:
        """Scale by `none`, `linear` or `sqrt`; the factor is reached after `warmup` steps."""
        self._scaling, self._warmup = scaling, warmup
        self.factor = 1.0
        """Of the next step."""
        self._before: list[Any] = []
        self._attached = False

    def set(self, members: int, *, step: int) -> None:
        """Set the factor of the next step.

        Args:
            members: How many members contribute gradients.
            step: Steps of the schedule already done, 0 for the first.
        """
        whole = {"none": 1.0, "linear": float(members), "sqrt": math.sqrt(members)}[self._scaling]
        reached = min(1.0, (step + 1) / (self._warmup + 1))
        self.factor = 1.0 + (whole - 1.0) * reached

    def attach(self, optimizer: Optimizer) -> None:
        """Register the step hooks on an optimizer."""
        if self._scaling != "none" and not self._attached:
            self._attached = True
            optimizer.register_step_pre_hook(self._enlarge)
            optimizer.register_step_post_hook(self._restore)

    def _enlarge(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _restore(self, optimizer: Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._before, strict=True):
            group["lr"] = rate
