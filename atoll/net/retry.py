"""Backoff between retries."""

from __future__ import annotations

import random as random_module
from collections.abc import Iterator


def backoff(
    *,
    first_s: float = 0.2,
    factor: float = 2.0,
    cap_s: float = 10.0,
    random: random_module.Random | None = None,
) -> Iterator[float]:
    """Yield waits in seconds without end: exponential, capped, with jitter.

    Each wait is drawn from the upper half of its interval, so that a thousand nodes that lost the
    same hub do not reconnect at the same moment.
    """
    source = random or random_module.Random()
    wait_s = first_s
    while True:
        yield wait_s * source.uniform(0.5, 1.0)
        wait_s = min(wait_s * factor, cap_s)
