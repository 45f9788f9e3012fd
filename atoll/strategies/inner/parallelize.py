"""Prepares a model for training on a rank."""

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

    In this order: tensor parallelism, recomputation, compilation, data parallelism. Meta tensors
    get uninitialized memory.

    Args:
        module: The whole model, or a pipeline stage. Changed in place.
        units: Its pieces.
        model: The whole model, for names and the tensor-parallel plan.
        mesh: All four axes.
        options: What to apply.
        device: Device of this rank.
        later: Whether the caller calls `replicate` itself for a replicated model.
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
    """Return a module with a backward pass that reduces over the data ranks; collective."""
    replicas, shards = mesh["replicate"].size(), mesh["shard"].size()
    if shards > 1 or (replicas > 1 and mesh["tensor"].size() > 1):
        # DDP's buckets need plain tensors; tensor-parallel parameters are DTensors.
        axes: Any = ("replicate", "shard") if replicas > 1 else "shard"
        shard(
            module, units, mesh=mesh[axes], reshard=options.reshard, offload=options.offload,
            dtype=dtype_of(options.precision),
        )  # fmt: skip
        return module
    MetaInit(device).give_memory([module])
    module.to(device)
    # A pipeline stage may have nothing to train, which torch refuses to average.
    if replicas == 1 or later or not any(p.requires_grad for p in module.parameters()):
        return module
    return replicate(module, mesh.get_group("replicate"))


def synced(module: nn.Module, *, last: bool, options: InnerOptions) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one reduces."""
    if isinstance(module, DistributedDataParallel):
        return without_sync(module, last=last)
    if isinstance(module, FSDPModule):
        set_sync(cast(FSDPModule, module), last=last, reshard=options.reshard)
    return nullcontext()
