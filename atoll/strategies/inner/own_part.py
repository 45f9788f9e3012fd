"""A rank's parameters as its optimizer steps on them: plain tensors, whatever they are part of.

What works number by number does to a part what it would do to that part of the whole. So a fused
kernel of plain tensors does for sharded parameters, too, and mixes of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.strategies.inner.transport import local_of, local_part

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"}
    | {"Rprop", "SGD"}
)
"""Optimizers that treat every number of a parameter by itself."""

EPSILON = 1e-6
"""Beside the norm that gradients are divided by, as in torch."""


class OwnPart:
    """The optimizer of one rank; made for a whole model, it steps on a part from now on."""

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Mapping[str, nn.Parameter],
        *,
        groups: Sequence[Sequence[str]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take an optimizer over.

        Args:
            optimizer: Without parameters; the settings of its groups stay.
            parts: This rank's parameters by name.
            groups: Names of all parameters of the whole model, by group of the optimizer.
            state: What the optimizer had for whole parameters already.

        Raises:
            ConfigError: it cannot step on parts of parameters.
        """
        kind = type(optimizer).__name__
        cut = [name for name, part in parts.items() if isinstance(part, DTensor)]
        if cut and kind not in ELEMENTWISE:
            raise ConfigError(
                "this optimizer needs whole parameters, and these are spread over ranks",
                given=f"{kind}, {len(cut)} of {len(parts)} parameters on a rank, e.g. {cut[0]}",
                expected=f"one of {', '.join(sorted(ELEMENTWISE))}",
                remedy='optimizer = "adamw" in [train], or inner = "ddp" or "pipeline"',
            )
        self.optimizer, self._parts = optimizer, parts
        self.steps_on: dict[str, nn.Parameter] = {
            name: nn.Parameter(local_of(part)) if isinstance(part, DTensor) else part
            for name, part in parts.items()
        }
        for group, names in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [self.steps_on[name] for name in names if name in parts]
        for name, own in state.items():
            if name in parts:
                optimizer.state[self.steps_on[name]] = {
                    key: _part_of(value, like=parts[name]) for key, value in own.items()
                }

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients that are here, by name; a DTensor where its parameter is one."""
        return {name: part.grad for name, part in self._parts.items() if part.grad is not None}

    @torch.no_grad()
    def step(self, *, factor: float = 1.0) -> None:
        """Update the parameters with their gradients times a factor, and drop these."""
        gradients: list[Tensor] = []
        for name, tensor in self.steps_on.items():
            part = self._parts[name]
            if part.grad is not None and tensor is not part:
                own = local_of(part)
                if tensor.data_ptr() != own.data_ptr():  # it was moved since
                    tensor.data = own
                tensor.grad = local_of(part.grad)
            if tensor.grad is not None:
                gradients.append(tensor.grad)
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        if gradients:
            self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradients."""
        for tensors in (self.steps_on, self._parts):
            for tensor in tensors.values():
                tensor.grad = None

    def set_rates(self, rates: Sequence[float]) -> None:
        """Set the learning rate of each group."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def clip_factor(norm: float, limit: float) -> float:
    """Return what gradients of a norm are multiplied by so that it is at most `limit`; 0: any."""
    return min(1.0, limit / (norm + EPSILON)) if limit else 1.0


def _part_of(value: Any, *, like: Tensor) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape == like.shape:
        return local_part(value, like=like).clone()
    return value
