"""What it costs that members tell the norm of their update: `python -m bench.norm`, JSON.

The norm replaces the sum that looked for NaN, so the price is the difference of two readings of
memory. It is set against the cheapest exchange there is: two members in one process, int8.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

from atoll.codec.registry import make_codec
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.period import PeriodReport
from atoll.group.run_round import mean_exchange, run_round
from atoll.strategies.vectors.flat import length

SIZES = (1_000_000, 10_000_000, 50_000_000)
REPEATS = 10
ROUNDS = 3


def milliseconds(work: Callable[[], object]) -> float:
    """Return the time of one call, after one that warms up."""
    work()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    return (time.perf_counter() - began) / REPEATS * 1e3


def exchange_ms(vector: torch.Tensor) -> float:
    """Return the quickest of some rounds of two members."""
    groups, seconds = MemoryGroups(2, timeout_s=300.0), []

    def body(group: Group) -> None:
        for round_ in range(ROUNDS):
            began = time.perf_counter()
            run_round(
                group,
                mean_exchange(group, [vector], codec=make_codec("int8"), weight=1.0),
                PeriodReport(round_, "b"),
            )
            seconds.append(time.perf_counter() - began)

    groups.together(body, timeout_s=300.0)
    return min(seconds) * 1e3


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    rows = []
    for size in SIZES[:1] if "--quick" in arguments else SIZES:
        vector = torch.randn(size)
        before = milliseconds(lambda v=vector: bool(torch.isfinite(v.sum())))  # type: ignore[misc]
        now = milliseconds(lambda v=vector: length(v))  # type: ignore[misc]
        exchange = exchange_ms(vector)
        share = (now - before) / exchange
        rows.append(
            {
                "numbers": size, "check_ms": round(before, 3), "norm_ms": round(now, 3),
                "exchange_ms": round(exchange, 1), "share_of_exchange": round(share, 5),
            }
        )  # fmt: skip
    sys.stdout.write(json.dumps({"norm": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
