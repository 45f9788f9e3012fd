"""One optimizer step on a single process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atoll.devices.choose import CPU
from atoll.errors import ConfigError, LossNotFinite
from atoll.strategies.base import Outer, StepResult, extend_history_hash
from atoll.strategies.inner.base import Rows
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import Scaler, apply_precision, check_precision
from atoll.strategies.inner.unit_transforms import apply_compile, apply_recompute
from atoll.strategies.inner.units import pieces, units_of
from atoll.task import Task

IGNORED = -100
"""Target that torch's `cross_entropy` leaves out of the mean."""

LossOf = Callable[[nn.Module, Any], tuple[Tensor, int | Tensor]]
"""Returns the mean loss of a batch, and its number of tokens: on a device, so as not to wait."""


def count_correct(outputs: Tensor, targets: Tensor) -> int:
    """Return how many of the samples, with one class each, are classified correctly."""
    return int((outputs.argmax(dim=-1) == targets).sum())


class _Norm:
    """The norm of gradients as they are now, on their device: the CPU does not wait for it."""

    def __init__(self, gradients: list[Tensor]) -> None:
        self.tensor = nn.utils.get_total_norm(gradients)
        self._of = _versions(gradients)

    def is_of(self, gradients: list[Tensor]) -> bool:
        """Return whether these are the same gradients, to which nothing was written since."""
        return self._of == _versions(gradients)


def _versions(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Return which tensors these are, and how often each was written to."""
    return [(id(tensor), tensor._version) for tensor in tensors]


class Local:
    """Forward, backward, clip, step, with the outer strategy's hooks in between.

    The CPU waits for an accelerator once in a step, when the whole backward pass and the gradients'
    norm are queued there: then it reads loss, tokens and norm.

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
        begun = time.monotonic()
        task.optimizer.zero_grad(set_to_none=True)
        value, tokens, norm = self._backward(task, batch)
        if self.scaler.active:
            task.overflowed, task.skipped = self._overflowed(task, value), False
        else:
            self._refuse_unless_finite(task, value, 0.0)
        task.tokens += tokens
        task.losses.add(None if task.overflowed else value)
        if self._options.least_step_s:  # not counting the exchange of gradients
            time.sleep(max(0.0, begun + self._options.least_step_s - time.monotonic()))
        with task.state_lock.moving():
            outer.gradients(task)
            length = self._update(task, value, norm)
            return StepResult(value, length, tokens, extend_history_hash(task, outer.sync(task)))

    def _backward(self, task: Task, batch: Any) -> tuple[float, int, _Norm | None]:
        """Compute the gradients by accumulation step; return the mean loss, tokens and norm.

        The norm is computed here on an accelerator without a loss scale only; else it is None.
        """
        parts = [batch] if self._rows.accumulate == 1 else self._rows.deal(*_tensors(batch))
        share, found = 1.0 / len(parts), []
        for part in parts:
            loss, counted = self._loss_of(task.model, part)
            factor = self.scaler.scale * share
            (loss if factor == 1.0 else loss * factor).backward()  # type: ignore[no-untyped-call]
            found.append((loss.detach(), counted))
        gradients = _gradients(task)
        ahead = not self.scaler.active and any(g.device.type != CPU for g in gradients[:1])
        norm = _Norm(gradients) if ahead else None
        value = sum(loss.item() * share for loss, _ in found)
        return value, sum(int(counted) for _, counted in found), norm

    def _overflowed(self, task: Task, loss: float) -> bool:
        """Unscale the gradients; if they are not finite, zero them and return True."""
        gradients = _gradients(task)
        self.scaler.unscale(gradients)
        if math.isfinite(loss) and math.isfinite(nn.utils.get_total_norm(gradients).item()):
            return False
        for gradient in gradients:
            gradient.zero_()
        return True

    def _update(self, task: Task, loss: float, norm: _Norm | None) -> float:
        """Clip and step; return the gradient norm before clipping."""
        if not self.scaler.update(finite=not (task.overflowed or task.skipped)):
            if self.scaler.exhausted:
                self._refuse_unless_finite(task, loss, math.inf)
            task.advance(updated=False)
            return math.inf
        gradients = _gradients(task)
        if norm is None or not norm.is_of(gradients):  # e.g. the mean over members took their place
            norm = _Norm(gradients)
        length = norm.tensor.item()
        self._refuse_unless_finite(task, loss, length)
        if self._clip:
            nn.utils.clip_grads_with_norm_(task.parameters(), self._clip, norm.tensor)
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


def language_model_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, int | Tensor]:
    """Return the mean loss of a model with a `loss` method on (inputs, targets), and their number.

    The number is a tensor where the targets are on a device.
    """
    inputs, targets = batch
    loss: Tensor = model.loss(inputs, targets)  # type: ignore[operator]
    return loss, _counted(targets)


def count_targets(targets: Tensor) -> int:
    """Return the number of targets that a mean loss is over; -100 marks others, as in torch."""
    return int(_counted(targets))


def _counted(targets: Tensor) -> int | Tensor:
    """Return the number of targets; a tensor if it has to be computed."""
    if targets.dim() < 2 or targets.is_floating_point():  # one class per sample, or values
        return targets.numel()
    return targets.numel() - (targets == IGNORED).sum()


def _gradients(task: Task) -> list[Tensor]:
    return [p.grad for p in task.parameters() if p.grad is not None]


def _tensors(batch: Any) -> tuple[Tensor, ...]:
    if isinstance(batch, tuple | list) and all(isinstance(part, Tensor) for part in batch):
        return tuple(batch)
    raise ConfigError(
        "a batch of this kind cannot be accumulated in parts", given=type(batch).__name__,
        expected="a tuple of tensors with one row per sample", remedy="accumulate = 1 in [train]",
    )  # fmt: skip
