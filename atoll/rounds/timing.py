"""Measured times of a job's rounds, and the time limits derived from them.

The grace for joins is proportional to the measured spread of joins, the limit of a reduce to its
measured duration. The measurements are stored with the job, so that a restarted hub keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

EMA = 0.3
"""Weight of the newest measurement in the moving averages."""

FIRST_TIMEOUT_S = 120.0
"""Limit of a reduce on a route that has not been measured."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 300.0
MIN_GRACE_S = 2.0
MAX_PERIOD_SHARE_S = 30.0
"""Limit of the part of the grace that grows with the period."""
MIN_HOLD_S, MAX_HOLD_S = 10.0, 60.0
BROKEN_S, MAX_BROKEN_S = 0.5, 5.0
"""Bounds of the time for which a broken connection may last without consequences."""


class RoundTimings(msgspec.Struct, kw_only=True):
    """Moving averages of one job. Changed only by the functions below and by `commit.py`."""

    spread_s: float | None = None
    """Seconds between the first and the last join of a round."""
    period_s: float | None = None
    """Seconds between two commits."""
    duration_s: dict[str, float] = {}
    """Seconds from plan to verdict, by route."""
    step_s: dict[str, float] = {}
    """Seconds of one optimizer step, by member."""
    reports: dict[str, int] = {}
    """Rounds in which each member reported its speed."""
    busy_s: dict[str, float] = {}
    """Total seconds of work behind each member's speed."""


@dataclass(frozen=True)
class FixedWaits:
    """Configured instead of measured time limits, for members in one process."""

    grace_s: float
    """Wait for the other joins after the first one."""
    hold_s: float
    """Wait for a recovering member."""
    timeout_s: float
    """Limit of a reduce."""


def mean(old: float | None, new: float, *, weight: float = EMA) -> float:
    """Return the moving average including a new measurement."""
    return new if old is None else (1 - weight) * old + weight * new


def learn_spread(timings: RoundTimings, spread_s: float) -> None:
    """Update the spread of joins; limited to two periods, because a pause is not a spread."""
    if timings.period_s is not None:
        spread_s = min(spread_s, 2 * timings.period_s)
    timings.spread_s = mean(timings.spread_s, spread_s)


def grace_s(timings: RoundTimings, *, first_s: float) -> float:
    """Return the seconds for which joins are awaited after the first; `first_s` if unmeasured."""
    if timings.spread_s is None or not timings.duration_s:
        return first_s
    share_s = min(MAX_PERIOD_SHARE_S, (timings.period_s or 0.0) / 4)
    return MIN_GRACE_S + 3 * timings.spread_s + share_s


def hold_s(timings: RoundTimings) -> float:
    """Return the seconds for which a round waits for a recovering member."""
    return min(MAX_HOLD_S, max(MIN_HOLD_S, timings.period_s or 0.0))


def broken_s(timings: RoundTimings) -> float:
    """Return the seconds for which an awaited member may be disconnected.

    A tenth of a period costs less than the member's loss of a round.
    """
    return min(MAX_BROKEN_S, max(BROKEN_S, (timings.period_s or 0.0) / 10))


def timeout_s(timings: RoundTimings, route: str, *, patience: float = 1.0) -> float:
    """Return the time limit of a reduce; `patience` grows with failed attempts."""
    duration = timings.duration_s.get(route)
    usual = FIRST_TIMEOUT_S if duration is None else MIN_TIMEOUT_S + 4 * duration
    return min(MAX_TIMEOUT_S, usual * patience)
