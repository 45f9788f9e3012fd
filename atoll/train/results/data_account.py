"""How often the samples of a script's data were trained on, from what its members report.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEY = "data"
"""Name in a member's result: per share and slot the committed `[passes, offset, size]`."""

Places = list[dict[str, list[int]]]


def account(
    results: Mapping[str, Mapping[str, Any]], *, samples_given: int
) -> dict[str, int] | None:
    """Return samples `given`, `committed`, `repeated` and `missed`; None if no data was shared.

    A pass that some slot has completed should be complete on all: the rest is `missed`. Samples
    are `repeated` if the step that they were given for was lost, with its process or its round.
    """
    places = _furthest(result[KEY] for result in results.values() if result.get(KEY))
    if not places:
        return None
    committed = missed = 0
    for slots in places:
        read = {slot: passes * size + offset for slot, (passes, offset, size) in slots.items()}
        complete = max(n // slots[slot][2] for slot, n in read.items())
        committed += sum(read.values())
        missed += sum(max(0, complete * slots[slot][2] - n) for slot, n in read.items())
    # A killed process sent its last point before its last round.
    samples_given = max(samples_given, committed)
    return {
        "given": samples_given, "committed": committed,
        "repeated": samples_given - committed, "missed": missed,
    }  # fmt: skip


def _furthest(reports: Iterable[Places]) -> Places:
    """Return each slot's furthest position: not every member was in the last round."""
    found: Places = []
    for report in reports:
        found += [{} for _ in range(len(report) - len(found))]
        for known, slots in zip(found, report, strict=False):
            for slot, place in slots.items():
                known[slot] = max(known.get(slot, place), place)
    return [slots for slots in found if slots]
