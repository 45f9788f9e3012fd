"""What NVIDIA's driver says of its accelerators, by its own library (NVML); no package is needed.

The driver brings the library. Source: the NVML API reference (https://docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

LIBRARIES = ("nvml.dll",) if sys.platform == "win32" else ("libnvidia-ml.so.1",)
NAME_BYTES = 96


class Library(Protocol):
    """Accelerators by number; every method raises OSError if the driver refuses."""

    def count(self) -> int:
        """Return how many there are."""
        ...

    def name(self, number: int) -> str:
        """Return the name of one, e.g. `NVIDIA H100 80GB HBM3`."""
        ...

    def memory(self, number: int) -> tuple[int, int]:
        """Return the used and all bytes of its memory."""
        ...

    def busy_percent(self, number: int) -> int:
        """Return the share of the last moment in which it computed."""
        ...


def load() -> Library | None:
    """Return the driver's library, ready to be asked; None: there is no such driver.

    Raises:
        OSError: there is one, and it cannot be used.
    """
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        return _Driver(library)
    return None


class _Memory(ctypes.Structure):
    """`nvmlMemory_t`."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Driver:
    """The library in this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handles: list[ctypes.c_void_p] = []
        self._call("nvmlInit_v2")
        found = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(found))
        for number in range(found.value):
            handle = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(number), ctypes.byref(handle))
            self._handles.append(handle)

    def count(self) -> int:
        return len(self._handles)

    def name(self, number: int) -> str:
        text = ctypes.create_string_buffer(NAME_BYTES)
        self._call("nvmlDeviceGetName", self._handles[number], text, ctypes.c_uint(NAME_BYTES))
        return text.value.decode(errors="replace")

    def memory(self, number: int) -> tuple[int, int]:
        found = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", self._handles[number], ctypes.byref(found))
        return int(found.used), int(found.total)

    def busy_percent(self, number: int) -> int:
        found = _Utilization()
        self._call("nvmlDeviceGetUtilizationRates", self._handles[number], ctypes.byref(found))
        return int(found.gpu)

    def _call(self, function: str, *arguments: Any) -> None:
        try:
            status = int(getattr(self._library, function)(*arguments))
        except AttributeError as error:
            raise OSError(f"NVIDIA's management library has no {function}") from error
        if status:
            raise OSError(f"NVIDIA's management library: {function} failed with status {status}")
