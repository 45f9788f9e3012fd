"""Copies between main memory and a device, beside the computation where the device can do that."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from atoll.devices.choose import CPU

STREAMS = ("cuda", "xpu")
"""Kinds of device that copy beside the computation: from page-locked memory, in a stream."""


def copies_beside(device: torch.device) -> bool:
    """Return whether a device copies from and to main memory while it computes."""
    return device.type in STREAMS


def placed(values: Any, device: torch.device) -> Any:
    """Return values with every tensor on a device: in tuples, lists, mappings; else unchanged.

    The copy may still run when this returns: only work of this device's current stream may use
    it. Tensors that are there already are not copied.
    """
    if isinstance(values, Tensor):
        return _placed(values, device)
    if isinstance(values, Mapping):
        parts = {key: placed(value, device) for key, value in values.items()}
        return parts if type(values) is dict else type(values)(parts)  # type: ignore[call-arg]
    if isinstance(values, tuple | list):
        found = [placed(value, device) for value in values]
        named = isinstance(values, tuple) and hasattr(values, "_fields")
        return type(values)(*found) if named else type(values)(found)
    return values


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device == device:
        return tensor
    if tensor.device.type == CPU and copies_beside(device):
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def host_tensor(numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised vector in main memory that a device copies to and from quickly."""
    return torch.empty(numel, dtype=dtype, pin_memory=copies_beside(device))


class Ahead:
    """A batch that is copied to a device while the device computes on another."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        beside = copies_beside(device)
        self._stream: Any = torch.get_device_module(device).Stream(device) if beside else None
        self._batch: Any = None

    def start(self, batch: Any) -> None:
        """Begin to copy a batch."""
        with self._beside():
            self._batch = placed(batch, self.device)

    def take(self) -> Any:
        """Return the batch that `start` got, on the device, ready for the current stream."""
        batch, self._batch = self._batch, None
        if self._stream is not None:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_stream(self._stream)
            _record(batch, current)
        return batch

    def _beside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        found: AbstractContextManager[Any] = torch.get_device_module(self.device).stream(
            self._stream
        )
        return found


def _record(values: Any, stream: Any) -> None:
    """Keep the memory of tensors until a stream's work on them is done."""
    if isinstance(values, Tensor):
        values.record_stream(stream)
    elif isinstance(values, Mapping):
        _record(list(values.values()), stream)
    elif isinstance(values, tuple | list):
        for value in values:
            _record(value, stream)
