"""The norm of a whole model's gradient, with parts on many ranks, used for clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atoll.strategies.inner.base import Parts
from atoll.strategies.inner.gather_scatter import local_of

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


@dataclass(frozen=True, slots=True)
class Length:
    """Properties of a gradient, equal on all ranks."""

    value: float
    """L2 norm over all trained parameters, each counted once."""
    finite: bool
    """Whether every element is finite on every rank."""
    loss: float = 0.0
    """Sum of the ranks' shares of the loss, if given."""


class GradientNorm:
    """Measures gradients over all ranks.

    Each rank adds the squares of its elements. Elements that several ranks hold are counted by one
    of them: the first along each mesh axis over which the parameter is not sharded. A parameter
    shared by pipeline stages is counted by the first of them.
    """

    def __init__(self, parts: Parts) -> None:
        """Determine what counts on this rank; collective."""
        self._parameters = parts.parameters()
        self._device = torch.device(parts.mesh.device_type)
        first = _first_holder(list(self._parameters), parts.mesh)
        self._counted = frozenset(
            name
            for name, parameter in self._parameters.items()
            if _counts(parameter, parts.mesh, stage=first[name])
        )

    def measure(self, share: Tensor | None = None) -> Length:
        """Return norm and finiteness of the gradients, and the sum of `share`; collective."""
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                local = local_of(parameter.grad)
                (counted if name in self._counted else others).append(local)
        squares = _squares(counted, self._device)
        spoilt = ~torch.isfinite(squares + _squares(others, self._device))
        own = torch.zeros_like(squares) if share is None else share.to(squares)
        sums = torch.stack([squares, spoilt.double(), own])
        dist.all_reduce(sums)
        total, bad, loss = sums.tolist()
        return Length(math.sqrt(total) if total >= 0 else math.nan, bad == 0, loss)


def complete(parameters: Iterable[nn.Parameter]) -> None:
    """Lay out gradients like their parameters, which reduces partial ones; collective."""
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def _squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares; not finite if an element is not."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    lengths = [length.double() for length in torch._foreach_norm(tensors)]
    return torch.stack(lengths).square().sum().to(device)


def _counts(parameter: nn.Parameter, mesh: DeviceMesh, *, stage: int) -> bool:
    """Return whether this rank counts a parameter for all ranks that hold it."""
    cut: set[str] = set()
    if isinstance(parameter, DTensor):
        axes = parameter.device_mesh.mesh_dim_names or ()
        placed = zip(axes, parameter.placements, strict=True)
        cut = {axis for axis, placement in placed if not placement.is_replicate()}
    if mesh.get_local_rank("pipeline") != stage:
        return False
    whole = {"replicate", "shard", "tensor"} - cut
    return all(mesh.get_local_rank(axis) == 0 for axis in whole)


def _first_holder(names: list[str], mesh: DeviceMesh) -> Mapping[str, int]:
    """Return the first pipeline stage of every name; collective."""
    stages = mesh["pipeline"].size()
    if stages == 1:
        return dict.fromkeys(names, 0)
    held: list[list[str]] = [[] for _ in range(stages)]
    dist.all_gather_object(held, names, group=mesh.get_group("pipeline"))
    return {name: stage for stage in reversed(range(stages)) for name in held[stage]}
