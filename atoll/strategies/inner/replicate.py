"""The whole model on several ranks, its gradients averaged while backward still runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=group,
        bucket_cap_mb=BUCKET_MB,
        broadcast_buffers=False,  # what changes is averaged after the step, see `WholeParts`
        find_unused_parameters=unused,
        gradient_as_bucket_view=True,  # one copy of the gradients, not two
    )


def without_sync(module: DistributedDataParallel, *, last: bool) -> AbstractContextManager[Any]:
    """Return the context of one of several backward passes: only the last one averages."""
    return nullcontext() if last else module.no_sync()


def agreed(good: bool, group: Any, device: torch.device) -> bool:
    """Return whether something holds on all ranks of a group; collective."""
    flag = torch.tensor(float(good), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=group)
    return bool(flag.item())
