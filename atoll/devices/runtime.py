"""A process's device: synchronization, current device, random states, process-group backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.devices.choose import CPU, accelerator, count

BACKENDS: Mapping[str, str] = {"cuda": "nccl", "xpu": "xccl"}
"""Kind of device -> backend of torch.distributed on it; others exchange in main memory by Gloo."""


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all work that was given to it."""
    if device.type != CPU:
        torch.accelerator.synchronize(device)


def set_current(device: torch.device) -> None:
    """Make a device the one on which this thread's new work runs."""
    if device.type != CPU:
        torch.accelerator.set_device_index(device.index or 0)


def backend(device: torch.device) -> str:
    """Return the backends of a process group of ranks on such devices.

    Tensors in main memory always have Gloo.
    """
    own = BACKENDS.get(device.type)
    return f"cpu:gloo,{device.type}:{own}" if own else "gloo"


def has_backend(device: torch.device) -> bool:
    """Return whether ranks can exchange tensors on such a device."""
    return device.type == CPU or device.type in BACKENDS


def random_states() -> list[Tensor]:
    """Return the states of the accelerators' random number generators, in the order of devices."""
    module = _random_module()
    return [module.get_rng_state(index) for index in range(count())] if module else []


def set_random_states(states: list[Tensor]) -> None:
    """Load what `random_states` returned.

    Without effect on a machine with another number of accelerators, where it has no meaning.
    """
    module = _random_module()
    if module and states and len(states) == count():
        for index, state in enumerate(states):
            module.set_rng_state(state, index)


def _random_module() -> Any:
    """Return torch's module with the generators of the accelerator; None: there are none."""
    kind = accelerator()
    module = torch.get_device_module(kind) if kind else None
    return module if hasattr(module, "get_rng_state") else None


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators from which a computation on a device draws: main memory's first."""
    found = [torch.default_generator]
    own = getattr(torch.get_device_module(device), "default_generators", None)
    if device.type != CPU and own:
        found.append(own[device.index or 0])
    return found
