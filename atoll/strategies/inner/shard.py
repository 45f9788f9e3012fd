"""FSDP: sharded parameters, gradients and optimizer state, gathered unit by unit when needed.

In half precision the sharded parameters, gradients and reductions stay fp32; only the gathered
copies are half as large, as autocast would cast matrices anyway. Norms and embeddings compute in
fp32 as under autocast, from rounded weights.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from atoll.strategies.inner.meta_init import MetaInit
from atoll.strategies.inner.units import pieces

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._BatchNorm)


def gathered_in(dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """Return the policy for gathering units; None: in the type of the parameters."""
    if dtype is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def keep_full_precision(module: nn.Module) -> None:
    """Let norms and embeddings of a module return fp32 for any type of weights, in place."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            part.register_forward_hook(_widened)
        elif isinstance(part, NORMS):
            vars(part)["forward"] = functools.partial(_in_fp32, part)


def _widened(part: nn.Module, given: tuple[Any, ...], outputs: Tensor) -> Tensor:
    return outputs.float()


def _in_fp32(part: nn.Module, *given: Any, **named: Any) -> Any:
    """Return a norm's outputs, computed with its weights in fp32."""
    wide = copy.copy(part)
    own = part._parameters.items()
    wide._parameters = {name: None if p is None else p.float() for name, p in own}  # type: ignore[misc]
    return type(part).forward(wide, *given, **named)


SMALL = 0.01
"""Units below this share of the largest one are gathered with the rest of the model."""

log = logging.getLogger(__name__)


def shard(
    module: nn.Module,
    units: Sequence[nn.Module],
    *,
    mesh: DeviceMesh,
    reshard: bool,
    offload: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of a module over a mesh, in place; names stay. Collective.

    Meta tensors get memory piece by piece, each sharded before the next one.

    Args:
        module: In main memory or on its device; it ends up on the mesh's device.
        units: Pieces gathered together. Parameters that several units share, and those in none,
            are gathered for the whole forward pass.
        mesh: One axis to shard over; or two, with replicas along the first.
        reshard: Whether units free gathered parameters after their forward pass.
        offload: Whether shards stay in main memory; always so on CPUs.
        dtype: Type in which units are gathered; None: that of the parameters.
    """
    if offload and mesh.device_type == "cpu":
        log.info("offload changes nothing here: without accelerators shards are in main memory")
    keep: OffloadPolicy = OffloadPolicy()
    if offload and mesh.device_type != "cpu":
        keep = CPUOffloadPolicy()
    if any(part.dtype == torch.float64 for part in module.parameters()):
        dtype = None  # autocast does not cast float64
    if dtype is not None:
        keep_full_precision(module)
    half = gathered_in(dtype)
    own = _large(_unshared(pieces(module, units)))
    meta_init = MetaInit(_device_of(mesh))
    for piece in own:
        meta_init.give_memory(piece)
        together: Any = piece if len(piece) > 1 else piece[0]
        fully_shard(
            together, mesh=mesh, reshard_after_forward=reshard, offload_policy=keep, mp_policy=half
        )
    meta_init.give_memory([module])
    # The rest is used first and last: freeing it in between would gather it twice.
    rest = reshard and not own
    fully_shard(module, mesh=mesh, reshard_after_forward=rest, offload_policy=keep, mp_policy=half)


def _device_of(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _unshared(units: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Return the units that share no parameter with another one."""
    held = [{id(p) for part in unit for p in part.parameters()} for unit in units]
    count = Counter(parameter for parameters in held for parameter in parameters)
    return [
        unit
        for unit, parameters in zip(units, held, strict=True)
        if all(count[parameter] == 1 for parameter in parameters)
    ]


def _large(units: list[list[nn.Module]]) -> list[list[nn.Module]]:
    """Return the units that are worth their own messages: a lone norm is not."""
    sizes = [sum(p.numel() for part in unit for p in part.parameters()) for unit in units]
    least = max(sizes, default=0) * SMALL
    return [unit for unit, size in zip(units, sizes, strict=True) if size > least]


def set_sync(module: FSDPModule, *, last: bool, reshard: bool) -> None:
    """Configure the reduction in one of several backward passes.

    All but the last one either keep whole gradients and send nothing, or, to save memory, shard
    them at once and leave only the sum over replicas to the last.
    """
    if reshard:
        module.set_requires_all_reduce(last)
    else:
        module.set_requires_gradient_sync(last)
