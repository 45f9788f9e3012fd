"""What every part of a model goes through before it can be trained on a rank.

Forward passes that torch turns into fewer and faster kernels.

Activations that are computed again in the backward pass instead of being kept.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from atoll.config.train_checks import recomputed_every
from atoll.strategies.inner.meta_init import MetaInit
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import dtype_of
from atoll.strategies.inner.replicate import replicate, without_sync
from atoll.strategies.inner.shard import set_sync, shard
from atoll.strategies.inner.units import pieces


def apply_compile(units: Sequence[nn.Module], *, backend: str = "inductor") -> None:
    """Let the forward pass of each unit go through `torch.compile`.

    It is done in place: modules, names and parameters stay as they are. Single layers are left
    alone: there is nothing in them to put together.
    """
    for unit in units:
        if any(True for _ in unit.children()):
            unit.forward = torch.compile(unit.forward, backend=backend)


PRODUCTS = (
    "mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""Operators whose results are dear to compute: matrix products and what is made of them."""


def apply_recompute(units: Sequence[nn.Module], word: str) -> None:
    """Let units forget their activations, and compute them again when gradients are due.

    Random numbers (dropout) come out as they did the first time. It is done in place: modules,
    names and parameters stay as they are. A unit that is a single layer has to keep its input
    anyway and is left alone.

    Args:
        units: In the order of the forward pass.
        word: `none`, `full`, `matmul` (all of a unit but its matrix products) or `every:N`.

    Raises:
        ConfigError: there is no such word.
    """
    every = recomputed_every(word)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if word == "matmul":
        options["context_fn"] = _keeping_products
    forgetful = torch.utils.checkpoint.checkpoint
    compound = [unit for unit in units if any(True for _ in unit.children())]
    for unit in compound[::every] if every else ():
        unit.forward = functools.partial(forgetful, unit.forward, **options)


def _keeping_products() -> Any:
    """Return the contexts of a pass that keeps the results of matrix products."""
    ops: Any = torch.ops.aten
    known = [getattr(ops, name).default for name in PRODUCTS if hasattr(ops, name)]
    contexts: Any = torch.utils.checkpoint.create_selective_checkpoint_contexts
    return contexts(known)


def parallelize(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    model: nn.Module,
    mesh: DeviceMesh,
    recipe: InnerOptions,
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
        recipe: What to do.
        device: What this rank computes on.
        later: Whether a whole model on several ranks is left for the caller to `replicate`.
    """
    if mesh["tensor"].size() > 1:
        from atoll.strategies.inner.tensor.tensor import apply_tensor

        apply_tensor(module, model, mesh["tensor"], recipe)
    own = [unit for piece in pieces(module, units) for unit in piece]
    apply_recompute(own, recipe.recompute)
    if recipe.compile:
        apply_compile(own)
    return apply_data(module, units, mesh=mesh, recipe=recipe, device=device, later=later)


def apply_data(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    recipe: InnerOptions,
    device: torch.device,
    later: bool = False,
) -> nn.Module:
    """Return a module whose backward pass reduces gradients over the data ranks; collective."""
    replicas, shards = mesh["replicate"].size(), mesh["shard"].size()
    if shards > 1 or (replicas > 1 and mesh["tensor"].size() > 1):
        # Parameters cut along the tensor axis are no plain tensors, which buckets are made of.
        axes: Any = ("replicate", "shard") if replicas > 1 else "shard"
        shard(
            module, units, mesh=mesh[axes], reshard=recipe.reshard, offload=recipe.offload,
            dtype=dtype_of(recipe.precision),
        )  # fmt: skip
        return module
    MetaInit(device).give_memory([module])
    module.to(device)
    if replicas == 1 or later:
        return module
    return replicate(module, mesh.get_group("replicate"))


def synced(module: nn.Module, *, last: bool, recipe: InnerOptions) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one ends the sum."""
    if isinstance(module, DistributedDataParallel):
        return without_sync(module, last=last)
    if isinstance(module, FSDPModule):
        set_sync(cast(FSDPModule, module), last=last, reshard=recipe.reshard)
    return nullcontext()
