"""Inner optimizers and learning-rate schedules of the built-in trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll.config import TrainTable
from atoll.errors import unknown

OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("cosine", "constant")


def build_optimizer(model: nn.Module, table: TrainTable) -> torch.optim.Optimizer:
    """Return the optimizer of a `[train]` table; only matrices decay.

    torch's fused kernels are used: one call instead of a dozen per tensor, which on small models
    is a measurable part of a step.

    Raises:
        ConfigError: no such optimizer.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": table.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if table.optimizer == "adamw":
        betas = (table.betas[0], table.betas[1])
        return torch.optim.AdamW(groups, lr=table.lr, betas=betas, fused=True)
    if table.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=table.lr, momentum=table.momentum, fused=True)
    raise unknown("optimizer", table.optimizer, OPTIMIZERS)


def learning_rate(table: TrainTable) -> Callable[[int], float]:
    """Return the rate of each step, counted from 0: linear warm-up, then the schedule.

    A function of the step alone, so that members that come late or again use the same rate.

    Raises:
        ConfigError: no such schedule.
    """
    if table.schedule not in SCHEDULES:
        raise unknown("schedule", table.schedule, SCHEDULES)
    span = max(1, table.steps - table.warmup)

    def rate(step: int) -> float:
        if step < table.warmup:
            return table.lr * (step + 1) / table.warmup
        if table.schedule == "constant":
            return table.lr
        progress = min(1.0, (step - table.warmup) / span)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return table.lr * (table.final_lr + (1.0 - table.final_lr) * cosine)

    return rate


class StepSchedule:
    """Sets an optimizer's rate as a function of the step; cheaper than torch's schedulers."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Callable[[int], float]) -> None:
        """Set the rate of step 0."""
        self._optimizer, self._rate = optimizer, rate
        self._step = 0
        self._apply()

    @property
    def rate(self) -> float:
        """The rate of the next step."""
        return self._rate(self._step)

    def step(self) -> None:
        """Set the rate of the step after."""
        self._step += 1
        self._apply()

    def _apply(self) -> None:
        rate = self._rate(self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a step."""
        self._step = int(state["step"])
        self._apply()
