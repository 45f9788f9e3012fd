"""Models on the meta device, which get memory piece by piece as they are cut.

So only rank 0, which holds the host model, ever needs memory for the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

META = torch.device("meta")


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose parameters have no memory; its buffers are copied.

    A parameter in two places is one there, too.
    """
    known: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device=META), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    return copy.deepcopy(model, known)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Return a model made without memory for its tensors, if it may be made like that.

    A model that keeps tensors which are neither parameters nor buffers is made whole: rank 0 sends
    only what is in the state of a model.
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
    """Gives memory to the meta tensors of a model."""

    def __init__(self, device: torch.device) -> None:
        """Give memory of a device."""
        self._device = device
        self._made: dict[int, tuple[Tensor, Any]] = {}
        """By id of the meta tensor; the tensor is kept alive so that the id is not reused."""

    def give_memory(self, modules: Iterable[nn.Module]) -> None:
        """Give memory to what has none in modules and below, in place; the numbers are undefined.

        A tensor in two places is one afterwards, too.
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
