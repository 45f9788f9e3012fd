"""Models on the meta device, which get memory piece by piece as they are sharded.

So only rank 0, which holds the host model, needs memory for the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

META = torch.device("meta")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with parameters on the meta device; buffers are copied.

    Shared parameters stay shared.
    """
    known: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=META), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, known)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model created on the meta device, if possible.

    A model with tensors that are neither parameters nor buffers is created normally, because rank 0
    sends only the state of a model.
    """
    with META:
        model = make()
    stray = any(
        isinstance(value, Tensor) and value.is_meta
        for module in model.modules()
        for value in vars(module).values()
    )
    return make() if stray else model


class MetaInit:
    """Allocates memory for the meta tensors of a model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[int, tuple[Tensor, Any]] = {}
        """By id of the meta tensor; the tensor is kept alive so that the id is not reused."""

    def give_memory(self, modules: Iterable[nn.Module]) -> None:
        """Allocate memory for meta tensors in modules and below, in place, uninitialized.

        Shared tensors stay shared.
        """
        for module in modules:
            for part in module.modules():
                for tensors in (part._parameters, part._buffers):
                    for name, tensor in tensors.items():
                        if tensor is not None and tensor.is_meta:
                            tensors[name] = self._filled(tensor)

    def _filled(self, tensor: Tensor) -> Any:
        if id(tensor) not in self._made:
            made = torch.empty_like(tensor.detach(), device=self._device)
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = (tensor, made)
        return self._made[id(tensor)][1]
