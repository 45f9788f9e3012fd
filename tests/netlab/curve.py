"""The losses of a SWARM's steps, from what its members reported of their parts of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Points = Iterable[dict[str, Any]]
"""Lines of `metrics.jsonl`."""


def curve_of(
    points: Points, *, stages: int, batch: int, saved: int = 0, killed: float = 0.0
) -> dict[range, float]:
    """Return the mean losses of those steps of which every row was reported.

    Every member of the last stage reports the loss of what it has computed itself, once a second:
    steps that are quicker share a point. Each mean is of the steps up to one that all members have
    reported. When all were `killed`, the steps after the `saved` one were trained again: what was
    reported of them before does not count.
    """
    processes: dict[str, dict[int, tuple[float, float]]] = {}
    for point in points:
        values, step = point["values"], point["step"]
        again = step > saved and point["time"] < killed
        if values.get("stage") == stages - 1 and not again:
            told = processes.setdefault(point["incarnation"], {})
            rows, total = told.get(step, (0.0, 0.0))
            new = values.get("rows", 0.0)
            told[step] = rows + new, total + new * values.get("loss", 0.0)
    found, first = {}, 1
    for step in range(1, max((max(told) for told in processes.values()), default=0) + 1):
        if all(step in told or not min(told) < step < max(told) for told in processes.values()):
            steps, first = range(first, step + 1), step + 1
            parts = [told[one] for told in processes.values() for one in steps if one in told]
            if sum(rows for rows, _ in parts) == batch * len(steps):
                found[steps] = sum(total for _, total in parts) / batch / len(steps)
    return found
