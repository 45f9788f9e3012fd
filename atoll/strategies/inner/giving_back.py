"""Memory that was freed goes back to the system, where the allocator would keep it."""

from __future__ import annotations

import ctypes
import gc
import sys


def give_back() -> None:
    """Give back what this process has freed; for moments after much was, as it takes a while.

    glibc keeps freed blocks between others that are in use, for the next time: after a whole model
    was cut into small pieces that can be as much as the model. Elsewhere nothing is done.
    """
    gc.collect()
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
