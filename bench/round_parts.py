"""Processor time of what a member does in a round of 40 MB: `python -m bench.round_parts`.

`hashes`: a member digests the result that it votes for, and the state after its step. Each runs by
turns with the others, on one thread; `ms` is the median of `--rounds` (process time, so that other
work on the machine does not count), `ratio` that over BLAKE2b's in the same turn.

`copies`: a copy of the vector into fresh memory, as a round makes several, with pages of 4 kB and
with large ones (`LARGE_PAGES`), in processes of their own by turns; and into memory in use.
JSON on stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from atoll.config.environment import LARGE_PAGES
from atoll.reducer.mean import result_digest
from atoll.strategies.vectors.flat import digest
from bench.kit.report import emit

ELEMENTS = 10_000_000
COPY = """
import statistics, time, torch
torch.set_num_threads(1)
vector = torch.randn({elements})
used, found = vector.clone(), {{"fresh": [], "in use": []}}
for _ in range({rounds}):
    for name, run in (("fresh", vector.clone), ("in use", lambda: used.copy_(vector))):
        began = time.process_time()
        run()
        found[name].append(time.process_time() - began)
print(*(1000 * statistics.median(found[name]) for name in found))
"""


def copies(*, rounds: int) -> dict[str, float]:
    """Return milliseconds of a copy into fresh memory, and into memory in use."""
    found: dict[str, list[float]] = {"fresh": [], "fresh, large pages": [], "in use": []}
    for _ in range(3):
        for name, wanted in (("fresh", "0"), ("fresh, large pages", "1")):
            environment = {**os.environ, **dict.fromkeys(LARGE_PAGES, wanted)}
            program = COPY.format(elements=ELEMENTS, rounds=rounds)
            done = subprocess.run(
                [sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                check=True, timeout=300,
            )  # fmt: skip
            fresh, used = map(float, done.stdout.split())
            found[name].append(fresh)
            found["in use"].append(used)
    return {name: round(statistics.median(values), 1) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds: int = parser.parse_args().rounds
    vector = torch.randn(ELEMENTS)
    raw: Any = vector.view(torch.uint8).numpy()
    data = memoryview(raw)
    hashes: dict[str, Callable[[], object]] = {
        "blake2b": lambda: hashlib.blake2b(data, digest_size=16).digest(),
        "sha256": lambda: hashlib.sha256(data).digest(),
        "result_digest": lambda: result_digest(data, ["w0", "w1"]),
        "state digest": lambda: digest(vector),
    }
    found: dict[str, list[float]] = {name: [] for name in hashes}
    for _ in range(rounds + 1):
        for name, run in hashes.items():
            began = time.process_time()
            run()
            found[name].append(time.process_time() - began)
    base = found["blake2b"][1:]
    rows = [
        {
            "hash": name,
            "ms": round(1000 * statistics.median(seconds[1:]), 1),
            "ratio": round(
                statistics.median(a / b for a, b in zip(seconds[1:], base, strict=True)), 3
            ),
        }
        for name, seconds in found.items()
    ]
    copied = copies(rounds=rounds)
    result = {"mb": 4 * ELEMENTS / 1e6, "rounds": rounds, "hashes": rows, "copies_ms": copied}
    emit(
        result, [*rows, *({"hash": f"copy: {k}", "ms": v, "ratio": 0.0} for k, v in copied.items())]
    )


if __name__ == "__main__":
    main()
