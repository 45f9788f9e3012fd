"""What a model computes in: autocast, and the scale of the loss that half precision needs.

Parameters, their gradients and the optimizer's state stay as they are, fp32 as a rule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, unknown

DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""Word of a job file -> what matrix products are computed in; None: what the parameters are in."""

FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, GOOD_STEPS = 2.0, 0.5, 2000
"""The scale doubles after so many good steps in a row, and is halved by an overflow."""
SMALLEST_SCALE = 2.0**-14
"""A loss that is scaled down below this, and still overflows, is wrong by itself."""


def dtype_of(word: str) -> torch.dtype | None:
    """Return what a word of a job file computes in; None for fp32.

    Raises:
        ConfigError: there is no such word.
    """
    if word not in DTYPES:
        raise unknown("precision", word, DTYPES)
    return DTYPES[word]


def computing(word: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in a precision on a device."""
    dtype = dtype_of(word)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def widened(outputs: Any, word: str) -> Any:
    """Return a model's outputs in fp32 if it computed in less: a loss needs the digits."""
    if dtype_of(word) is None or not isinstance(outputs, Tensor):
        return outputs
    return outputs.float() if outputs.is_floating_point() else outputs


def apply_precision(model: nn.Module, word: str, device: torch.device) -> None:
    """Let a model compute in a precision and give its outputs in fp32; done in place.

    Raises:
        ConfigError: there is no such word.
    """
    if dtype_of(word) is not None:
        model.forward = functools.partial(_forward, model.forward, word, device)


def _forward(forward: Any, word: str, device: torch.device, *inputs: Any, **named: Any) -> Any:
    with computing(word, device):
        outputs = forward(*inputs, **named)
    return widened(outputs, word)


def check_precision(word: str, device: torch.device) -> None:
    """Raise if a device cannot compute in a precision; found out by a small product.

    Raises:
        ConfigError: there is no such word, or the product or its gradient fails.
    """
    dtype = dtype_of(word)
    if dtype is None:
        return
    try:
        with torch.enable_grad():
            factor = torch.ones(8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=dtype):
                product = factor @ factor
            product.float().sum().backward()  # type: ignore[no-untyped-call]
        good = product.dtype is dtype and factor.grad is not None
        reason = f"products come out in {product.dtype}"
    except (RuntimeError, ValueError) as error:
        good, reason = False, str(error).splitlines()[0]
    if not good:
        raise ConfigError(
            f"this machine cannot compute in {word}", given=f"device {device}: {reason}",
            expected="matrix products and their gradients in that precision",
            remedy='precision = "bf16" or "fp32" in [train], or a machine with an accelerator',
        )  # fmt: skip


class Scaler:
    """The scale of the loss against underflow in fp16; 1 and without effect in other precisions.

    The caller says whether a step's gradients were finite on all ranks; with equal answers
    the scalers of all ranks stay equal.
    """

    def __init__(self, precision: str) -> None:
        """Start at 2^16 for `fp16`."""
        self.active = dtype_of(precision) is torch.float16
        self.scale = FIRST_SCALE if self.active else 1.0
        self.good_steps = 0
        """In a row, since the scale was last changed."""

    @property
    def exhausted(self) -> bool:
        """Whether smaller scales are no remedy any more."""
        return self.scale < SMALLEST_SCALE

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the scale out of gradients, in place; exact, as scales are powers of two."""
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        if self.active and local:
            torch._foreach_mul_(local, 1.0 / self.scale)

    def update(self, *, finite: bool) -> bool:
        """Count a step; return whether its gradients may be used.

        Args:
            finite: Whether all gradients are, on all ranks. Without a scale to lower a step with
                others is for the caller to refuse: then this is always true.
        """
        if not self.active:
            return True
        if not finite:
            self.scale, self.good_steps = self.scale * BACKOFF, 0
            return False
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS:
            self.scale, self.good_steps = self.scale * GROWTH, 0
        return True

    def state_dict(self) -> dict[str, float]:
        """Return the scale and how long it has been good; nothing in other precisions."""
        if not self.active:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take up what `state_dict` returned; of another precision it means nothing.

        Raises:
            ValueError: these are no numbers that a scaler has.
        """
        if self.active and state:
            self.scale, self.good_steps = checked_scale(state)


def checked_scale(state: Mapping[str, float]) -> tuple[float, int]:
    """Return the scale and the good steps of a scaler's state that came from elsewhere.

    Raises:
        ValueError: the scale is no power of two, or the steps are none that are counted.
    """
    scale, good_steps = float(state["scale"]), int(state["good_steps"])
    if not (math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"the scale of the loss is {scale}, which is no power of two")
    if not 0 <= good_steps < GOOD_STEPS:
        raise ValueError(f"{good_steps} good steps in a row; the scale grows after {GOOD_STEPS}")
    return scale, good_steps
