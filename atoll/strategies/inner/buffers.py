"""Buffers that a forward pass changes (running means): the same on all ranks that see data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from atoll.strategies.inner.rows import DATA_AXES, sum_over_data


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
