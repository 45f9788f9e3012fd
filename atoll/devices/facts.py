"""What a device is and can do: name, memory, number types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from atoll.devices.choose import CPU, accelerator, count
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What is known of a device; also of the processor, without its memory."""

    device: str
    """e.g. `cuda:0`."""
    name: str
    """For people, e.g. `NVIDIA GeForce RTX 3060`."""
    count: int
    """Devices of this kind in this machine."""
    memory_bytes: int
    """All of its memory; 0: not known."""
    bf16: bool
    """Whether it computes in bf16 natively."""
    float64: bool
    """Whether it supports float64."""


def facts(device: torch.device) -> DeviceFacts:
    """Return what a device is and can do; small trials run on it."""
    on_cpu = device.type == CPU
    return DeviceFacts(
        str(device), name_of(device), 1 if on_cpu else count(), memory(device)[1],
        has_bf16(device), has_float64(device),
    )  # fmt: skip


def here() -> list[torch.device]:
    """Return the accelerators that torch finds here."""
    return [torch.device(accelerator(), index) for index in range(count())]


def name_of(device: torch.device) -> str:
    """Return the name of a device for people."""
    if device.type == CPU:
        return "processor"
    if device.type == "mps":
        return "Apple GPU"
    query = getattr(_module(device), "get_device_name", None)
    return str(query(device)) if query is not None else str(device)


def memory(device: torch.device) -> tuple[int, int]:
    """Return a device's free and total memory in bytes; zeros: not known, as of the processor."""
    if device.type == CPU:
        return 0, 0
    module = _module(device)
    if device.type == "mps":
        most = int(module.recommended_max_memory())
        return max(0, most - int(module.driver_allocated_memory())), most
    query = getattr(module, "mem_get_info", None)
    try:
        if query is None:
            query = torch.accelerator.get_memory_info  # type: ignore[attr-defined, unused-ignore]
        free, total = query(device)
    except (AttributeError, RuntimeError, NotImplementedError):  # torch lacks the figure
        return 0, 0
    return int(free), int(total)


def used_bytes(device: torch.device) -> int:
    """Return the bytes that this process's tensors occupy on a device; 0: not known."""
    if device.type == CPU:
        return 0
    module = _module(device)
    query = getattr(module, "memory_allocated", None)
    if device.type == "mps":
        return int(module.current_allocated_memory())
    return int(query(device)) if query is not None else 0


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that this process's tensors have occupied on a device; 0: not known."""
    query = None if device.type == CPU else getattr(_module(device), "max_memory_allocated", None)
    return int(query(device)) if query is not None else 0


def has_bf16(device: torch.device) -> bool:
    """Return whether an accelerator computes in bf16 itself, so that it is worth using.

    False for the processor: few have instructions for it, and without them it is slower.
    """
    if device.type == CPU:
        return False
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        one = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
        return (one @ one).dtype is torch.bfloat16
    except (RuntimeError, TypeError, NotImplementedError):  # the device has no kernel for it
        return False


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64; MPS does not."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, TypeError):
        return False
    return True


def check_dtypes(dtypes: set[torch.dtype], device: torch.device) -> None:
    """Check that a device has these number types.

    Raises:
        ConfigError: one is missing, e.g. 64-bit numbers on Apple's accelerator.
    """
    for dtype in sorted(dtypes, key=str):
        try:
            torch.zeros(1, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"this accelerator has no numbers of type {dtype}",
                given=f"device {device}: {str(error).splitlines()[0]}",
                expected="a model with numbers that the device has, usually fp32",
                remedy=f'convert the model, e.g. model.float(), or set device = "{CPU}" in [job]',
            ) from error


def _module(device: torch.device) -> Any:
    """Return torch's module of a device, e.g. `torch.cuda`."""
    return torch.get_device_module(device)
