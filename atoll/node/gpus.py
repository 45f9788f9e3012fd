"""The accelerators of a machine as NVIDIA's management library sees them, where it is installed."""

from __future__ import annotations

import importlib
import logging
from typing import Any

log = logging.getLogger(__name__)


class Gpus:
    """Asks the library; without it, or without an accelerator, there are none."""

    def __init__(self) -> None:
        """Open the library."""
        self._library: Any = None
        self._handles: list[Any] = []
        try:
            library: Any = importlib.import_module("pynvml")
            library.nvmlInit()
            self._handles = [
                library.nvmlDeviceGetHandleByIndex(index)
                for index in range(library.nvmlDeviceGetCount())
            ]
            self._library = library
        except ImportError:
            return
        except Exception as error:  # the library has one class of errors, and it is not imported
            log.debug("no accelerators can be asked: %s", error)

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def name(self) -> str:
        """Name of the first one; empty: there is none."""
        if not self._handles:
            return ""
        name = self._library.nvmlDeviceGetName(self._handles[0])
        return name.decode() if isinstance(name, bytes) else str(name)

    @property
    def memory_bytes(self) -> int:
        """Memory of the first one."""
        if not self._handles:
            return 0
        return int(self._library.nvmlDeviceGetMemoryInfo(self._handles[0]).total)

    def figures(self) -> dict[str, float]:
        """Return `gpu_percent` (the mean of all) and `gpu_memory_used_bytes` (their sum)."""
        if not self._handles:
            return {}
        try:
            library = self._library
            busy = [library.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu in self._handles]
            used = [library.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._handles]
        except Exception as error:  # e.g. the driver was updated under it
            log.warning("the accelerators cannot be asked any more: %s", error)
            self._handles = []
            return {}
        return {
            "gpu_percent": float(sum(busy)) / len(busy),
            "gpu_memory_used_bytes": float(sum(used)),
        }
