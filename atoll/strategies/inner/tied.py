"""Weights that several stages of a pipeline have: their gradients are summed over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.errors import ConfigError
from atoll.strategies.inner.transport import local_of

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""


class TiedGradients:
    """Copies of one weight on several ranks of a pipeline; with equal gradients they stay equal."""

    def __init__(
        self,
        holders: Mapping[str, Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """Make the groups; every rank of the mesh calls it.

        Args:
            holders: Which ranks of a row have it, by name.
            parameters: What is on this rank, by name.
            mesh: All four axes.
            device: What this rank computes on.

        Raises:
            ConfigError: the copies are cut in different ways along other axes.
        """
        self._parameters = parameters
        groups = {ranks: _group(ranks, mesh) for ranks in map(tuple, holders.values())}
        self._groups = {
            name: groups[tuple(ranks)] for name, ranks in holders.items() if name in parameters
        }
        for name, group in self._groups.items():
            shape = local_of(parameters[name]).shape
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, tuple(shape), group=group)
            if len(set(told)) > 1:
                raise ConfigError(
                    "a weight that stages of a pipeline share is cut differently on each",
                    given=f"{name}: {' and '.join(map(str, told))}",
                    expected="the same piece on every stage",
                    remedy="a plan in [island] that treats both modules alike",
                )

    @torch.no_grad()
    def add_up(self) -> None:
        """Replace each gradient by the sum over all copies; collective."""
        for name, group in self._groups.items():
            parameter = self._parameters[name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local: Tensor = local_of(parameter.grad)
            dist.all_reduce(local, group=group)


def _group(ranks: Sequence[int], mesh: DeviceMesh) -> Any:
    """Return the group of some ranks of this rank's row; every rank of the mesh calls it."""
    rows = mesh.mesh.movedim(2, -1).reshape(-1, mesh.mesh.shape[2])
    found: Any = None
    for row in rows.tolist():
        group = dist.new_group([row[k] for k in ranks])
        if dist.get_rank() in row:
            found = group
    return found
