"""The optimizer of a rank's parameters, on local tensors, and its state as whole tensors by name.

Elementwise optimizers treat a part like that part of the whole. Fused kernels of plain tensors
therefore work for sharded parameters, and for mixtures of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.strategies.inner.gather_scatter import (
    Kind,
    Subgroups,
    Transport,
    as_part,
    local_of,
    local_part,
)
from atoll.task import RemoteState

ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop"}
    | {"Rprop", "SGD"}
)
"""Optimizers that treat every element of a parameter independently."""

EPSILON = 1e-6
"""Added to the norm by which gradients are divided, as in torch."""


class LocalShard:
    """The optimizer of one rank, made for a whole model, which steps on this rank's part."""

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Mapping[str, nn.Parameter],
        *,
        groups: Sequence[Sequence[str]],
        state: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Take over an optimizer without parameters; the settings of its groups stay.

        `groups` are the names of all parameters of the whole model, `state` existing state for
        them.

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
        """Return the local gradients by name; DTensors for DTensor parameters."""
        return {name: part.grad for name, part in self._parts.items() if part.grad is not None}

    @torch.no_grad()
    def step(self, *, factor: float = 1.0) -> None:
        """Update the parameters with their gradients times a factor, and drop the gradients."""
        gradients: list[Tensor] = []
        for name, tensor in self.steps_on.items():
            part = self._parts[name]
            if part.grad is not None and tensor is not part:
                own = local_of(part)
                if tensor.data_ptr() != own.data_ptr():  # the parameter's memory has moved
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
    """Return the factor that limits gradients to norm `limit`; 0: unlimited."""
    return min(1.0, limit / (norm + EPSILON)) if limit else 1.0


def _part_of(value: Any, *, like: Tensor) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape == like.shape:
        return local_part(value, like=like).clone()
    return value


dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

State = Mapping[str, Mapping[str, Tensor]]
"""Parameter -> key of the optimizer -> whole tensor."""

Outline = dict[str, dict[str, Tensor | Kind]]
"""Parameter -> key of the optimizer -> whole tensor, or the kind of a large one."""

AT_ONCE = 1024
"""Tensors up to this many elements are included in an outline."""

_BETWEEN = "\n"


class OptimizerState:
    """The state of the ranks' optimizers; every method is collective."""

    def __init__(
        self,
        optimizer: Optimizer,
        parts: Mapping[str, Tensor],
        *,
        steps_on: Mapping[str, Tensor] | None = None,
        device: torch.device,
        subgroups: Subgroups,
    ) -> None:
        """View this rank's optimizer and parameters, by their name in the whole model.

        `steps_on` are the tensors that the optimizer steps on, if different.
        """
        self._optimizer, self._parts = optimizer, parts
        self._keys = steps_on if steps_on is not None else parts
        self._device, self._subgroups = device, subgroups
        self._outlined: Transport | None = None

    def gather(self) -> dict[str, dict[str, Tensor]]:
        """Return the whole state, in main memory, on rank 0; others get nothing."""
        found: dict[str, dict[str, Tensor]] = {}
        for both, whole in self._transport_now().gather():
            name, _, key = both.partition(_BETWEEN)
            found.setdefault(name, {})[key] = whole.to("cpu", copy=True)
        return found

    def outline(self) -> Outline:
        """Return the same with large tensors by their kind, to be read with `fetch`."""
        self._outlined = transport = self._transport_now()
        found: Outline = {}
        for both, kind in transport.kinds.items():
            name, _, key = both.partition(_BETWEEN)
            entry: Tensor | Kind = kind
            if kind.elements <= AT_ONCE:
                whole = transport.whole(both)
                entry = kind if whole is None else whole.to("cpu", copy=True)
            found.setdefault(name, {})[key] = entry
        return found

    def fetch(self, name: str, key: str) -> Tensor | None:
        """Return a whole tensor of the last `outline` on rank 0, perhaps the optimizer's own."""
        if self._outlined is None:
            raise RuntimeError("an outline comes first")
        whole = self._outlined.whole(name + _BETWEEN + key)
        return None if whole is None else whole.cpu()

    def _transport_now(self) -> Transport:
        parts: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            for key, value in self._optimizer.state.get(self._keys[name], {}).items():
                if isinstance(value, Tensor):
                    parts[name + _BETWEEN + key] = _as_the(value, of=part)
        return Transport(parts, device=self._device, subgroups=self._subgroups)

    def deal(
        self, state: State | None = None, groups: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Load what `gather` returned, with the groups' settings, on rank 0; None on the others."""
        self._outlined = None  # its parts are about to be replaced
        sent: list[Any] = [_kinds(state), [dict(group) for group in groups or ()]]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(sent, src=0)
        kinds, settings = sent
        blank: dict[str, Tensor] = {}
        for both, (shape, dtype) in kinds.items():
            part = self._parts.get(both.partition(_BETWEEN)[0])
            if part is not None:
                blank[both] = _blank(shape, dtype, of=part)
        wholes = None
        if state is not None:
            wholes = {
                name + _BETWEEN + key: v for name, own in state.items() for key, v in own.items()
            }
        Transport(blank, device=self._device, subgroups=self._subgroups).deal(wholes)
        self._load(blank, settings)

    def _load(self, parts: Mapping[str, Tensor], settings: Iterable[Mapping[str, Any]]) -> None:
        """Load the state in the optimizer's own format."""
        packed = self._optimizer.state_dict()["param_groups"]
        for group, own in zip(packed, settings, strict=False):
            group.update(own)
        places = {
            id(tensor): place
            for place, tensor in enumerate(
                t for group in self._optimizer.param_groups for t in group["params"]
            )
        }
        state: dict[int, dict[str, Tensor]] = {}
        for both, part in parts.items():
            name, _, key = both.partition(_BETWEEN)
            tensor = self._keys[name]
            value = part if isinstance(tensor, DTensor) else local_of(part)
            state.setdefault(places[id(tensor)], {})[key] = value
        self._optimizer.load_state_dict({"state": state, "param_groups": packed})


def remote_state(outline: Outline, *, fetch: Callable[..., Tensor]) -> dict[str, dict[str, Any]]:
    """Return an outline's state with a :class:`RemoteState` for every large tensor.

    `fetch` is called with `name` and `key` when one of them is needed.
    """
    return {
        name: {
            key: RemoteState(entry.shape, entry.dtype, partial(fetch, name=name, key=key))
            if isinstance(entry, Kind)
            else entry
            for key, entry in own.items()
        }
        for name, own in outline.items()
    }


def _as_the(value: Tensor, *, of: Tensor) -> Tensor:
    """Return an optimizer's tensor with its parameter's layout, if the shapes are equal."""
    if isinstance(value, DTensor) or not isinstance(of, DTensor):
        return value
    return as_part(value, like=of) if value.dim() and value.shape == local_of(of).shape else value


def _blank(shape: Sequence[int], dtype: torch.dtype, *, of: Tensor) -> Tensor:
    if isinstance(of, DTensor) and tuple(shape) == tuple(of.shape):
        return as_part(torch.empty_like(local_of(of), dtype=dtype), like=of)
    return torch.empty(tuple(shape), dtype=dtype, device=of.device)


def _kinds(state: State | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        name + _BETWEEN + key: (tuple(value.shape), value.dtype)
        for name, own in (state or {}).items()
        for key, value in own.items()
    }
