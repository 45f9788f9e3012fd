"""Cuts that make the slowest stage of a pipeline as fast as possible. No torch."""

from __future__ import annotations

from collections.abc import Sequence


def balanced(
    costs: Sequence[float], *, stages: int, speeds: Sequence[float] = ()
) -> tuple[int, ...]:
    """Return the units before which to cut, so that the most expensive stage is cheapest.

    Ties go to stages of similar cost; equal costs give equal cuts. At most one stage per unit.
    `speeds` by stage divide its cost; empty: all are 1.
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    speeds = speeds or (1.0,) * stages
    # best[n]: best split of the first n units: (most expensive stage, sum of squares, cuts)
    best: list[tuple[float, float, tuple[int, ...]]] = [
        (s / speeds[0], (s / speeds[0]) ** 2, ()) for s in sums
    ]
    for stage in range(2, stages + 1):
        speed = speeds[stage - 1]
        best = [
            min(
                (
                    max(best[cut][0], (sums[end] - sums[cut]) / speed),
                    best[cut][1] + ((sums[end] - sums[cut]) / speed) ** 2,
                    (*best[cut][2], cut),
                )
                for cut in range(stage - 1, end)
            )
            if end >= stage
            else best[end]
            for end in range(len(sums))
        ]
    return best[-1][2]
