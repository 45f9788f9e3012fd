"""Child processes that end with the hub."""

from __future__ import annotations

import sys
from collections.abc import Callable


def death_with_parent() -> Callable[[], None] | None:
    """Return the function that makes Linux kill a child with the hub; None elsewhere.

    The C library is loaded here, before the fork: a forked child of a process with threads
    should import nothing.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    pr_set_pdeathsig, sigkill = 1, 9
    return lambda: prctl(pr_set_pdeathsig, sigkill) and None
