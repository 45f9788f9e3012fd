"""Optimizers on a device: the kernels that it has, and states that come from another device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from atoll.devices.choose import CPU

KERNELS = ("fused", "foreach", "capturable")
"""Options of torch's optimizers that choose kernels and change no result beyond rounding."""


def has_fused(device: torch.device) -> bool:
    """Return whether a device has fused kernels for an optimizer's step, by trying one."""
    if device.type in (CPU, "meta", "cuda"):
        return True
    try:
        weight = torch.zeros(1, device=device, requires_grad=True)
        weight.grad = torch.zeros(1, device=device)
        torch.optim.AdamW([weight], fused=True).step()
    except (RuntimeError, NotImplementedError):  # torch raises either for a kernel that is missing
        return False
    return True


def load_optimizer(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load a state that may come from another kind of device.

    The optimizer keeps its own kernels. Its tensors go to the devices of the parameters.

    Raises:
        ValueError: the state is of another optimizer.
    """
    groups = state.get("param_groups")
    own = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    if isinstance(groups, list) and len(groups) == len(own):
        kept = [
            {**theirs, **{name: mine[name] for name in KERNELS if name in mine and name in theirs}}
            for theirs, mine in zip(groups, own, strict=True)
        ]
        state = {**state, "param_groups": kept}
    optimizer.load_state_dict(state)
