"""Do to a model what it needs before it can be trained on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from atoll.strategies.inner.meta_init import MetaInit
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import dtype_of
from atoll.strategies.inner.replicate import replicate, without_sync
from atoll.strategies.inner.shard import set_sync, shard
from atoll.strategies.inner.unit_transforms import apply_compile, apply_recompute
from atoll.strategies.inner.units import pieces


def parallelize(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    model: nn.Module,
    mesh: DeviceMesh,
    options: InnerOptions,
    device: torch.device,
    later: bool = False,
) -> nn.Module:
    """Return a part of a model ready to train; collective.

    In this order: cut along the tensor axis, recomputation, compilation, data parallelism. What of
    it has no memory yet gets it, without numbers.

    Args:
        module: The part: all of the model, or a stage of a pipeline. Changed in place.
        units: Its pieces.
        model: The whole model, whose names and tensor-parallel plan count.
        mesh: All four axes.
        options: What to do.
        device: What this rank computes on.
        later: Whether a whole model on several ranks is left for the caller to `replicate`.
    """
    if mesh["tensor"].size() > 1:
        from atoll.strategies.inner.tensor.tensor import apply_tensor

        apply_tensor(module, model, mesh["tensor"], options)
    own = [unit for piece in pieces(module, units) for unit in piece]
    apply_recompute(own, options.recompute)
    if options.compile:
        apply_compile(own)
    return apply_data(module, units, mesh=mesh, options=options, device=device, later=later)


def apply_data(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    options: InnerOptions,
    device: torch.device,
    later: bool = False,
) -> nn.Module:
    """Return a module whose backward pass reduces gradients over the data ranks; collective."""
    replicas, shards = mesh["replicate"].size(), mesh["shard"].size()
    if shards > 1 or (replicas > 1 and mesh["tensor"].size() > 1):
        # Parameters cut along the tensor axis are no plain tensors, which buckets are made of.
        axes: Any = ("replicate", "shard") if replicas > 1 else "shard"
        shard(
            module, units, mesh=mesh[axes], reshard=options.reshard, offload=options.offload,
            dtype=dtype_of(options.precision),
        )  # fmt: skip
        return module
    MetaInit(device).give_memory([module])
    module.to(device)
    if replicas == 1 or later:
        return module
    return replicate(module, mesh.get_group("replicate"))


def synced(module: nn.Module, *, last: bool, options: InnerOptions) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one ends the sum."""
    if isinstance(module, DistributedDataParallel):
        return without_sync(module, last=last)
    if isinstance(module, FSDPModule):
        set_sync(cast(FSDPModule, module), last=last, reshard=options.reshard)
    return nullcontext()
