"""One optimizer step on this member alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from atoll.errors import LossNotFinite
from atoll.strategies.past import note
from atoll.strategies.strategy import Outer, StepResult
from atoll.task import Task

LossOf = Callable[[nn.Module, Any], tuple[Tensor, int]]
"""Returns the mean loss of a batch, and how many tokens it has."""


class Local:
    """Forward, backward, clip, step; the outer strategy's two moments in between.

    Gradients are combined before they are clipped, as in data parallel training: the norm that
    counts is that of the mean.
    """

    def __init__(self, loss_of: LossOf, *, clip: float = 0.0) -> None:
        """Compute losses with `loss_of`; `clip` is the largest gradient norm, 0 for any."""
        self._loss_of, self._clip = loss_of, clip

    def step(self, task: Task, batch: Any, outer: Outer) -> StepResult:
        """Do one step; see :meth:`Inner.step`."""
        task.optimizer.zero_grad(set_to_none=True)
        loss, tokens = self._loss_of(task.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        value = loss.item()
        self._refuse_unless_finite(task, value, 0.0)
        task.tokens += tokens
        task.losses.add(value)
        with task.gate.moving():
            outer.gradients(task)
            length = self._update(task, value)
            return StepResult(value, length, tokens, note(task, outer.sync(task)))

    def _update(self, task: Task, loss: float) -> float:
        """Clip and step; return the norm of the gradient before."""
        gradients = [p.grad for p in task.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        length = norm.item()
        self._refuse_unless_finite(task, loss, length)
        if self._clip:
            nn.utils.clip_grads_with_norm_(task.parameters(), self._clip, norm)
        task.optimizer.step()
        task.advance()
        return length

    @staticmethod
    def _refuse_unless_finite(task: Task, loss: float, norm: float) -> None:
        """Raise before the update if it would spoil the parameters."""
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = "the loss" if not math.isfinite(loss) else "the gradient"
        raise LossNotFinite(
            f"{what} is not finite; the update was refused",
            given=f"member {task.member}, step {task.step + 1}, loss {loss}, gradient norm {norm}",
            expected="finite numbers",
            remedy="lower the learning rate, warm up longer, or set clip",
        )


def language_model_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the mean loss of a model with a `loss` method on (inputs, targets)."""
    inputs, targets = batch
    loss: Tensor = model.loss(inputs, targets)  # type: ignore[operator]
    return loss, targets.numel()
