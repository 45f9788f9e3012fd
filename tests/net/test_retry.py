from __future__ import annotations

import itertools
import random

from atoll.net.retry import backoff


def waits(count: int, *, seed: int = 1) -> list[float]:
    source = backoff(first_s=0.2, factor=2.0, cap_s=5.0, random=random.Random(seed))
    return list(itertools.islice(source, count))


def test_waits_grow_to_the_cap_and_stay_there() -> None:
    for wait_s, full_s in zip(waits(9), [0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 5, 5], strict=True):
        assert full_s / 2 <= wait_s <= full_s


def test_two_nodes_do_not_wait_the_same() -> None:
    assert waits(5, seed=1) != waits(5, seed=2)
