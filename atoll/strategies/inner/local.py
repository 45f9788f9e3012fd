"""One optimizer step on a single process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, LossNotFinite
from atoll.strategies.base import Outer, StepResult, extend_history_hash
from atoll.strategies.inner.base import Rows
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import Scaler, apply_precision, check_precision
from atoll.strategies.inner.unit_transforms import apply_compile, apply_recompute
from atoll.strategies.inner.units import pieces, units_of
from atoll.task import Task

LossOf = Callable[[nn.Module, Any], tuple[Tensor, int]]
"""Returns the mean loss of a batch, and its number of tokens."""


def count_correct(outputs: Tensor, targets: Tensor) -> int:
    """Return how many of the samples, with one class each, are classified correctly."""
    return int((outputs.argmax(dim=-1) == targets).sum())


class Local:
    """Forward, backward, clip, step, with the outer strategy's hooks in between.

    Gradients are combined before they are clipped, as in data parallel training: the norm of the
    mean counts.
    """

    def __init__(
        self, loss_of: LossOf, *, clip: float = 0.0, options: InnerOptions | None = None
    ) -> None:
        """Configure the step; `clip` is the largest gradient norm, 0: unlimited."""
        self._loss_of, self._clip, self._options = loss_of, clip, options or InnerOptions()
        self.scaler = Scaler(self._options.precision)
        """Of the loss, against underflow in fp16."""
        self._rows = Rows(accumulate=self._options.accumulate)
        self._prepared: nn.Module | None = None

    def prepare(self, model: nn.Module) -> None:
        """Apply the options to a model in place; otherwise the first step does it.

        Raises:
            ConfigError: an option is unknown, or the device does not support the precision.
        """
        if self._prepared is model:
            return
        options, device = self._options, next(model.parameters(), torch.empty(0)).device
        check_precision(options.precision, device)
        units = [unit for piece in pieces(model, units_of(model)) for unit in piece]
        apply_precision(model, options.precision, device)
        apply_recompute(units, options.recompute)
        if options.compile:
            apply_compile(units)
        self._prepared = model

    def step(self, task: Task, batch: Any, outer: Outer) -> StepResult:
        """Do one step; see :meth:`Inner.step`.

        If gradients overflow in half precision the step makes no progress: it counts for rounds,
        but not for the learning rate.
        """
        self.prepare(task.model)
        task.optimizer.zero_grad(set_to_none=True)
        value, tokens = self._backward(task.model, batch)
        if self.scaler.active:
            task.overflowed, task.skipped = self._overflowed(task, value), False
        else:
            self._refuse_unless_finite(task, value, 0.0)
        task.tokens += tokens
        task.losses.add(None if task.overflowed else value)
        with task.gate.moving():
            outer.gradients(task)
            length = self._update(task, value)
            return StepResult(value, length, tokens, extend_history_hash(task, outer.sync(task)))

    def _backward(self, model: nn.Module, batch: Any) -> tuple[float, int]:
        """Compute the gradients by accumulation step; return the mean loss and the tokens."""
        parts = [batch] if self._rows.accumulate == 1 else self._rows.deal(*_tensors(batch))
        share, value, tokens = 1.0 / len(parts), 0.0, 0
        for part in parts:
            loss, counted = self._loss_of(model, part)
            factor = self.scaler.scale * share
            (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            value, tokens = value + loss.item() * share, tokens + counted
        return value, tokens

    def _overflowed(self, task: Task, loss: float) -> bool:
        """Unscale the gradients; if they are not finite, zero them and return True."""
        gradients = [p.grad for p in task.parameters() if p.grad is not None]
        self.scaler.unscale(gradients)
        if math.isfinite(loss) and math.isfinite(nn.utils.get_total_norm(gradients).item()):
            return False
        for gradient in gradients:
            gradient.zero_()
        return True

    def _update(self, task: Task, loss: float) -> float:
        """Clip and step; return the gradient norm before clipping."""
        if not self.scaler.update(finite=not (task.overflowed or task.skipped)):
            if self.scaler.exhausted:
                self._refuse_unless_finite(task, loss, math.inf)
            task.advance(taken=False)
            return math.inf
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


def _tensors(batch: Any) -> tuple[Tensor, ...]:
    if isinstance(batch, tuple | list) and all(isinstance(part, Tensor) for part in batch):
        return tuple(batch)
    raise ConfigError(
        "a batch of this kind cannot be accumulated in parts", given=type(batch).__name__,
        expected="a tuple of tensors with one row per sample", remedy="accumulate = 1 in [train]",
    )  # fmt: skip
