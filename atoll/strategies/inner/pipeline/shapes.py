"""Transfers between pipeline stages: their shapes, forward passes, and shared weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.errors import ConfigError
from atoll.strategies.inner.gather_scatter import local_of
from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.cuts import as_tuple

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

Kinds = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shape and type of each tensor passed between two stages."""


def kinds_of(tensors: Sequence[Tensor]) -> Kinds:
    """Return shapes and types of tensors."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def empties(kinds: Kinds, *, learns: bool) -> tuple[Tensor, ...]:
    """Return meta tensors; `learns`: they get gradients."""
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta").requires_grad_(
            learns and dtype.is_floating_point
        )
        for shape, dtype in kinds
    )


class StageShapes:
    """Forward passes without gradients through the stages of a row of ranks."""

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        shape: PipelineShape,
        activations: Activations,
        *,
        group: Any,
        device: torch.device,
    ) -> None:
        self._activations = activations
        self._modules, self._shape, self._group, self._device = modules, shape, group, device
        self._rank = dist.get_rank(group)
        self._known: dict[Any, list[Kinds]] = {}

    def known(self, part: Tensor) -> bool:
        """Return whether `kinds` needs no communication for a microbatch."""
        return kinds_of((part,)) in self._known

    @torch.no_grad()
    def kinds(self, part: Tensor) -> list[Kinds]:
        """Return the outputs' kinds of every stage for a microbatch; collective if it is new.

        They are found by a real forward pass, because precision, parallelism inside a stage and
        the packing of activations affect them. Buffers and the random state are unchanged.
        """
        key = kinds_of((part,))
        if key in self._known:
            return self._known[key]
        self._activations.begin([part])
        self._activations.enter(0)
        modes = {number: module.training for number, module in self._modules.items()}
        found: list[Kinds] = []
        sent: list[tuple[Any, Tensor]] = []
        for number in range(self._shape.stages):
            by_rank: list[Any] = [None]
            outputs: tuple[Tensor, ...] = ()
            if number in self._modules:
                values = self._receive(number, found[-1]) if found else (part,)
                module = self._modules[number].eval()
                outputs = as_tuple(module(*values))
                by_rank = [kinds_of(outputs)]
                module.train(modes[number])
            dist.broadcast_object_list(
                by_rank,
                group_src=number % self._shape.ranks,
                group=self._group,
                device=self._device,
            )
            found.append(by_rank[0])
            if number < self._shape.stages - 1:
                sent += self._send(number, outputs)
        for work, _ in sent:
            work.wait()
        self._known[key] = found
        return found

    @torch.no_grad()
    def forward(self, inputs: Tensor, *, microbatches: int) -> Iterator[Any]:
        """Yield the model's outputs of each microbatch, on the last rank; collective.

        `inputs`, (rows, ...), are used on the first rank and cut into equal microbatches.
        """
        parts = inputs.chunk(microbatches)
        kinds = self.kinds(parts[0])
        self._activations.begin(parts)
        last = self._shape.stages - 1
        for number, module in self._modules.items():
            # With one stage per rank microbatches are streamed; with more, neighbours would
            # deadlock unless they send and receive in turns.
            streamed = self._shape.chunks == 1
            incoming = (
                ((part,) for part in parts)
                if number == 0
                else (self._receive(number, kinds[number - 1]) for _ in parts)
            )
            ready = incoming if streamed else iter(list(incoming))
            sent: list[tuple[Any, Tensor]] = []
            for place, values in enumerate(ready):
                self._activations.enter(place)
                outputs = module(*values)
                if number == last:
                    yield outputs
                elif streamed:
                    sent += self._send(number, as_tuple(outputs))
                else:
                    sent += [(None, tensor) for tensor in as_tuple(outputs)]
            for work, tensor in sent:
                (work or self._isend(number, tensor)).wait()

    def _receive(self, number: int, kinds: Kinds) -> tuple[Tensor, ...]:
        values = tuple(
            torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in kinds
        )
        for value in values:
            dist.irecv(value, group_src=(number - 1) % self._shape.ranks, group=self._group).wait()
        return values

    def _send(self, number: int, outputs: tuple[Tensor, ...]) -> list[tuple[Any, Tensor]]:
        return [(self._isend(number, output), output) for output in outputs]

    def _isend(self, number: int, tensor: Tensor) -> Any:
        return dist.isend(tensor, group_dst=(number + 1) % self._shape.ranks, group=self._group)


class TiedGradients:
    """Copies of shared weights on several ranks of a pipeline; equal gradients keep them equal."""

    def __init__(
        self,
        holders: Mapping[str, Sequence[int]],
        parameters: Mapping[str, nn.Parameter],
        *,
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        """Create the groups; every rank of the mesh MUST call this.

        `holders` are the ranks of a row with each weight, `parameters` those on this rank, by name.

        Raises:
            ConfigError: the copies are sharded differently along other axes.
        """
        self._parameters = parameters
        groups = {ranks: row_group(ranks, mesh) for ranks in map(tuple, holders.values())}
        self._groups = {
            name: groups[tuple(ranks)] for name, ranks in holders.items() if name in parameters
        }
        for name, group in self._groups.items():
            shape = local_of(parameters[name]).shape
            by_rank: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(by_rank, tuple(shape), group=group)
            if len(set(by_rank)) > 1:
                raise ConfigError(
                    "a weight that stages of a pipeline share is cut differently on each",
                    given=f"{name}: {' and '.join(map(str, by_rank))}",
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


def row_group(ranks: Sequence[int], mesh: DeviceMesh) -> Any:
    """Return the group of some ranks of this rank's row; every rank of the mesh MUST call this."""
    rows = mesh.mesh.movedim(2, -1).reshape(-1, mesh.mesh.shape[2])
    found: Any = None
    for row in rows.tolist():
        group = dist.new_group([row[k] for k in ranks])
        if dist.get_rank() in row:
            found = group
    return found
