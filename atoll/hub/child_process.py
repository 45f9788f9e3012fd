"""Child processes that end with the hub."""

from __future__ import annotations

import sys
from collections.abc import Callable


def death_with_parent() -> Callable[[], None] | None:
    """Return a function that makes Linux kill a child with the hub; None elsewhere.

    Loads the C library before the fork: a forked child of a threaded process must not import.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig, sigkill = 1, 9
    return lambda: prctl(pr_set_pdeathsig, sigkill) and None
