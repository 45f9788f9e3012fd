"""How long to wait before trying again."""

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

    Each is drawn evenly from the upper half of its interval, so that a thousand nodes that lost
    the same hub do not come back in the same instant, and none comes back at once.
    """
    source = random or random_module.Random()
    wait_s = first_s
    while True:
        yield wait_s * source.uniform(0.5, 1.0)
        wait_s = min(wait_s * factor, cap_s)
