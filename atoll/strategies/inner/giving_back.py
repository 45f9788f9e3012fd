"""Memory that was freed goes back to the system, where the allocator would keep it.

glibc keeps freed blocks of up to 32 MB for the next time, and cannot give back those between others
that are in use. A rank's pieces of a model come and go in blocks of a few MB: by and by as much as
the model would be kept for nothing.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

LARGE_BYTES = 4 << 20
"""Blocks from this size on go back at once. That costs a quarter of a millisecond per MB when the
next one is touched; smaller ones are faster to keep."""

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def keep_little() -> None:
    """Let large blocks of this process go back to the system as soon as they are freed."""
    system = _glibc()
    if system is not None:
        system.mallopt(_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Give back what this process has freed: for moments after much was, as it takes a while."""
    system = _glibc()
    if system is not None:
        system.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library if it is the one that has to be told."""
    if not sys.platform.startswith("linux"):
        return None
    system = ctypes.CDLL(None)
    known = hasattr(system, "malloc_trim") and hasattr(system, "mallopt")  # musl has none
    return system if known else None
