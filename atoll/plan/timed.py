"""Times of one piece of work, repeated."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from atoll.devices.runtime import synchronize
from atoll.strategies.inner.pipeline.hosts import Link

REPEATS = 9
"""Measurements of a transfer, a reduction or a machine; the shortest counts."""
SMALL, LARGE = 1, 2**20
"""Numbers of fp32 values of which transfers and reductions are timed."""


def shortest(
    work: Callable[[], object],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the shortest of some runs, after one to warm up."""
    work()
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        begun = clock()
        work()
        synchronize(device)
        found.append(clock() - begun)
    return min(found)


def fitted(times: list[float], *, count: int = LARGE) -> Link:
    """Return the link whose transfers of `SMALL` and `count` values take these times."""
    small, large = times
    # On a busy machine the small one may have taken as long.
    return Link(small, 4 * count / max(large - small, large / 2, 1e-9))
