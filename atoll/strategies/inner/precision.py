"""Precision of computation: autocast, and the loss scale that half precision needs.

Parameters, gradients and the optimizer's state keep their type, usually fp32.
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

from atoll.devices.facts import has_bf16
from atoll.errors import ConfigError, unknown

DTYPES: Mapping[str, torch.dtype | None] = MappingProxyType(
    {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
)
"""Name in a job file -> type of matrix products; None: that of the parameters."""

# The first four are the defaults of `torch.amp.GradScaler`.
FIRST_SCALE = 2.0**16
GROWTH, BACKOFF, GOOD_STEPS = 2.0, 0.5, 2000
"""The scale doubles after so many consecutive good steps, and is halved by an overflow."""
SMALLEST_SCALE = 2.0**-14
"""A loss that still overflows with a smaller scale is itself not finite."""


def dtype_of(word: str) -> torch.dtype | None:
    """Return the type for a name in a job file, None for fp32; raises ConfigError."""
    if word not in DTYPES:
        raise unknown("precision", word, DTYPES)
    return DTYPES[word]


AUTO = "auto"


def precision_on(word: str, device: torch.device) -> str:
    """Return the precision on a device; `auto` is bf16 where the device has it, else fp32."""
    if word != AUTO:
        return word
    return "bf16" if has_bf16(device) else "fp32"


def computing(word: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context in which a model computes in a precision on a device."""
    dtype = dtype_of(word)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def widened(outputs: Any, word: str) -> Any:
    """Return a model's low-precision outputs in fp32, which the loss needs."""
    if dtype_of(word) is None or not isinstance(outputs, Tensor):
        return outputs
    return outputs.float() if outputs.is_floating_point() else outputs


def apply_precision(model: nn.Module, word: str, device: torch.device) -> None:
    """Let a model compute in a precision and return fp32 outputs, in place; raises ConfigError."""
    if dtype_of(word) is not None:
        model.forward = functools.partial(_forward, model.forward, word, device)


def _forward(forward: Any, word: str, device: torch.device, *inputs: Any, **named: Any) -> Any:
    with computing(word, device):
        outputs = forward(*inputs, **named)
    return widened(outputs, word)


def check_precision(word: str, device: torch.device) -> None:
    """Test with a small product whether a device supports a precision.

    Raises:
        ConfigError: the name is unknown, or the product or its gradient fails.
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
    """The loss scale against underflow in fp16; 1 and without effect in other precisions.

    The caller decides whether a step's gradients were finite on all ranks; with equal decisions the
    scalers of all ranks stay equal.
    """

    def __init__(self, precision: str) -> None:
        self.active = dtype_of(precision) is torch.float16
        self.scale = FIRST_SCALE if self.active else 1.0
        self.good_steps = 0
        """Consecutive, since the last change of the scale."""

    @property
    def exhausted(self) -> bool:
        """Whether smaller scales cannot help any more."""
        return self.scale < SMALLEST_SCALE

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide gradients by the scale, in place; exact, because scales are powers of two."""
        local = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients]
        if self.active and local:
            torch._foreach_mul_(local, 1.0 / self.scale)

    def update(self, *, finite: bool) -> bool:
        """Count a step; return whether its gradients may be used.

        `finite`: all gradients are, on all ranks. Without fp16 this always returns True: the caller
        decides about other steps.
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
        """Return the scale and its good steps; empty in other precisions."""
        if not self.active:
            return {}
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Load a state; ignored in other precisions. Raises ValueError if it is invalid."""
        if self.active and state:
            self.scale, self.good_steps = checked_scale(state)


def checked_scale(state: Mapping[str, float]) -> tuple[float, int]:
    """Return scale and good steps of an untrusted state.

    Raises:
        ValueError: the scale is not a power of two, or the steps are out of range.
    """
    scale, good_steps = float(state["scale"]), int(state["good_steps"])
    if not (math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"the scale of the loss is {scale}, which is no power of two")
    if not 0 <= good_steps < GOOD_STEPS:
        raise ValueError(f"{good_steps} good steps in a row; the scale grows after {GOOD_STEPS}")
    return scale, good_steps
