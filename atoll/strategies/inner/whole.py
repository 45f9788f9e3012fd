"""A rank that runs all layers of a model, which may be replicated or sharded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from atoll.strategies.inner.base import Rows, sum_over_data
from atoll.strategies.inner.gradient_norm import complete
from atoll.strategies.inner.model_facts import criterion_of, saved_buffers, untrained_state
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.parallelize import parallelize, synced
from atoll.strategies.inner.precision import apply_precision
from atoll.strategies.inner.replicate import average, average_changes, replicate
from atoll.strategies.inner.units import units_of


class WholeParts:
    """All layers of a model; parameters whole, or cut along `shard` and `tensor`.

    See :class:`Parts`.
    """

    def __init__(
        self, model: nn.Module, options: InnerOptions, *, mesh: DeviceMesh, device: torch.device
    ) -> None:
        """Take over a model that is equal on all ranks; collective.

        Raises:
            ConfigError: the model has no criterion, or an option is unknown.
        """
        self.mesh = mesh
        self._model, self._options, self._device = model, options, device
        criterion_of(model)  # raises before anything is changed
        self._rows = Rows.of(mesh, accumulate=options.accumulate)
        apply_precision(model, options.precision, device)
        self._module = parallelize(
            model, units_of(model), model=model, mesh=mesh, options=options, device=device,
            later=True,
        )  # fmt: skip
        self._criterion = criterion_of(model)  # again: tensor parallelism may have replaced it
        copied = mesh["replicate"].size() > 1 and not isinstance(self._module, FSDPModule)
        self._group: Any = mesh.get_group("replicate") if copied else None
        self._unused: bool | None = None
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self._buffers, self._untrained = saved_buffers(model), untrained_state(model)

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """See :meth:`Parts.parameters`."""
        return self._parameters

    def buffers(self) -> Mapping[str, Tensor]:
        """See :meth:`Parts.buffers`."""
        return self._buffers

    def untrained(self) -> Mapping[str, Tensor]:
        """See :meth:`Parts.untrained`."""
        return self._untrained

    def train(self, mode: bool) -> None:
        """See :meth:`Parts.train`."""
        self._module.train(mode)

    @property
    def constrained(self) -> bool:
        """See :meth:`Parts.constrained`."""
        return False

    def constrain(self) -> None:
        """See :meth:`Parts.constrain`: any parameters will do."""

    def stepping(self) -> AbstractContextManager[None]:
        """See :meth:`Parts.stepping`."""
        return nullcontext()

    def backward(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, summed: bool = True
    ) -> Tensor:
        """See :meth:`Parts.backward`."""
        parts = self._rows.deal(inputs, targets)
        for parameter in self._parameters.values():
            parameter.grad = None
        if self._unused is not None and self._module is self._model:
            self._module = replicate(self._model, self._group, unused=self._unused)
        before = [buffer.clone() for buffer in self._buffers.values()]
        share, total = 1.0 / len(parts), torch.zeros((), device=self._device)
        for number, part in enumerate(parts, 1):
            with synced(self._module, last=number == len(parts), options=self._options):
                loss = self._loss(*part)
                (loss * (scale * share)).backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach() * share
        if self._group is not None and self._unused is None:
            # The first time without DDP, to find out whether the forward pass skips parameters.
            self._unused = not average(list(self._parameters.values()), self._group)
        complete(self._parameters.values())
        if before:
            average_changes(self._buffers.values(), before, mesh=self.mesh)
        if not summed:
            return total / self.mesh.size()  # ranks along the tensor axis have the same rows
        return sum_over_data(total / self._rows.ranks, self.mesh)

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Parts.loss`."""
        total = torch.zeros((), device=self._device)
        for share, part in self._rows.fill(inputs, targets):
            total = total + self._loss(*part) * share
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered parameters would outlive a change of the shards
        return sum_over_data(total, self.mesh)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = self._module(inputs.to(self._device))
        return self._criterion(outputs, targets.to(self._device))
