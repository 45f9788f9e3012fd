"""Replicas of a model with gradients averaged during backward, and averaged buffers."""

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

from atoll.devices.choose import CPU
from atoll.strategies.inner.base import DATA_AXES, sum_over_data
from atoll.strategies.vectors.flat import real_view

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

BUCKET_MB = 25
"""Size of gradient buckets; the first is reduced while later gradients are computed."""


def replicate(module: nn.Module, group: Any, *, unused: bool = False) -> DistributedDataParallel:
    """Return a module that averages gradients over a group in its backward pass; collective.

    The module is on its device, with equal parameters on all ranks. `unused`: the forward pass may
    skip parameters, which costs a traversal of the graph in every step.
    """
    device = next(module.parameters()).device
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {buffers: False}  # `average_changes` handles them after backward
    return DistributedDataParallel(
        module,
        device_ids=None if device.type == CPU else [device],
        process_group=group,
        bucket_cap_mb=BUCKET_MB,
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,  # avoids a second copy of the gradients
        **options,
    )


def without_sync(module: DistributedDataParallel, *, last: bool) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one averages."""
    return nullcontext() if last else module.no_sync()


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], group: Any) -> bool:
    """Average gradients over a group one by one; collective.

    Returns whether every parameter has a gradient on every rank. One without any keeps none.
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
    """Add the mean change of buffers in a forward pass over all data ranks; collective.

    Averaging changes, not values, keeps unchanged values bitwise equal. `before` are copies of the
    previous values, equal on all data ranks.
    """
    names = mesh.mesh_dim_names or ()
    ranks = math.prod(mesh.shape[names.index(axis)] for axis in DATA_AXES)
    if ranks == 1 or not before:
        return
    now = [real_view(buffer) for buffer in buffers]
    before = [real_view(buffer) for buffer in before]
    changes = torch.cat([(a - b).flatten() for a, b in zip(now, before, strict=True)])
    sum_over_data(changes, mesh).div_(ranks)
    pieces = torch.split(changes, [buffer.numel() for buffer in now])
    for buffer, old, change in zip(now, before, pieces, strict=True):
        buffer.copy_(old + change.view_as(old))
