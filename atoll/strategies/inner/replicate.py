"""The whole model on several ranks, its gradients averaged while backward still runs.

Buffers that a forward pass changes (running means): the same on all ranks that see data.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from atoll.strategies.inner.base import DATA_AXES, sum_over_data

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""

BUCKET_MB = 25
"""Gradients travel together up to this size, the first while others are still computed."""


def replicate(module: nn.Module, group: Any, *, unused: bool = False) -> DistributedDataParallel:
    """Return a module whose backward pass averages gradients over a group; collective.

    Args:
        module: On its device, with equal parameters on all ranks.
        group: The process group.
        unused: Whether there may be parameters that the forward pass leaves out: finding them
            costs a walk over the graph in every step.
    """
    device = next(module.parameters()).device
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False}  # what changes in them is averaged after backward
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=BUCKET_MB,
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,  # one copy of the gradients, not two
        **options,
    )


def without_sync(module: DistributedDataParallel, *, last: bool) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one averages."""
    return nullcontext() if last else module.no_sync()


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], group: Any) -> bool:
    """Average gradients over a group one by one; collective.

    Returns:
        Whether every parameter has one on every rank. One that has none on any rank keeps none.
    """
    ranks = dist.get_world_size(group)
    device = parameters[0].device
    users = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int64, device=device)
    dist.all_reduce(users, group=group)
    for parameter, count in zip(parameters, users.tolist(), strict=True):
        if count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad.div_(ranks), group=group)
    return all(count == ranks for count in users.tolist())


@torch.no_grad()
def average_changes(
    buffers: Iterable[Tensor], before: Sequence[Tensor], *, mesh: DeviceMesh
) -> None:
    """Give all data ranks the mean of what a forward pass has made of buffers; collective.

    Means of changes: what does not change stays as it is to the last bit.

    Args:
        buffers: As they are; changed in place.
        before: Copies of what they were, equal on all data ranks.
        mesh: With the axes `replicate` and `shard`.
    """
    names = mesh.mesh_dim_names or ()
    ranks = math.prod(mesh.shape[names.index(axis)] for axis in DATA_AXES)
    if ranks == 1 or not before:
        return
    now = list(buffers)
    changes = torch.cat([(a - b).flatten() for a, b in zip(now, before, strict=True)])
    sum_over_data(changes, mesh).div_(ranks)
    pieces = torch.split(changes, [buffer.numel() for buffer in now])
    for buffer, old, change in zip(now, before, pieces, strict=True):
        buffer.copy_(old + change.view_as(old))
