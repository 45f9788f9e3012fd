"""Run schedules from the command line: by seed, or many of a kind.

python -m tests.faults.simulation random:17          one schedule, with its trace
python -m tests.faults.simulation random 0 1000      random schedules 0 to 999
python -m tests.faults.simulation matrix 0 3         every cell with the seeds 0 to 2
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.faults.simulation.faults import matrix
from tests.faults.simulation.schedule import Outcome, replay, run_cell, run_random

SHOWN = 4
"""Seeds shown of one kind of failure."""


def many(words: list[str]) -> Iterator[Outcome]:
    first, last = int(words[1]), int(words[2])
    if words[0] == "random":
        yield from (run_random(seed) for seed in range(first, last))
        return
    chosen = words[3] if len(words) > 3 else ""
    for cell in matrix():
        if chosen in str(cell):
            yield from (run_cell(cell, seed) for seed in range(first, last))


def main(words: list[str]) -> int:
    if len(words) == 1:
        outcome = replay(words[0])
        sys.stdout.write("\n".join([*outcome.trace, *outcome.struck, *outcome.broken, ""]))
        return len(outcome.broken)
    began, count, bad, late = time.perf_counter(), 0, 0, 0.0
    kinds: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    for outcome in many(words):
        count += 1
        late = max(late, outcome.late_s)
        if words[0] == "matrix" and not outcome.struck:
            missed[outcome.what] += 1
        if outcome.broken:
            bad += 1
            kind = re.sub(r"[0-9a-f]{6,}|[0-9.]+", "#", outcome.broken[0].partition(": ")[2])[:60]
            kinds[kind] += 1
            if kinds[kind] <= SHOWN:
                sys.stdout.write(f"{outcome.seed}  {outcome.broken[0][:200]}\n")
        elif outcome.late_s > 60:
            sys.stdout.write(f"{outcome.seed}  late by {outcome.late_s:.0f} s {outcome.struck}\n")
    seconds = time.perf_counter() - began
    sys.stdout.write(f"{count} schedules in {seconds:.1f} s, {bad} broken, latest {late:.0f} s\n")
    for kind, number in kinds.most_common(20):
        sys.stdout.write(f"  {number} x {kind}\n")
    sys.stdout.write(f"never struck: {dict(missed.most_common(12))}\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
