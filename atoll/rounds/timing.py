"""What was measured of a job's rounds, and the patience that follows from it.

No time-out is guessed: joins are awaited in proportion to how far apart they came before, a reduce
in proportion to how long it took before. The measurements are part of the job's record, so that a
hub that was restarted is as patient as before.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

EMA = 0.3
"""Weight of the newest measurement in the running means."""

FIRST_TIMEOUT_S = 120.0
"""How long a reduce may take on a route that was not measured yet."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 300.0
MIN_GRACE_S = 2.0
MAX_PERIOD_SHARE_S = 30.0
"""Bound of the part of a grace that grows with the period."""
MIN_HOLD_S, MAX_HOLD_S = 10.0, 60.0
BROKEN_S, MAX_BROKEN_S = 0.5, 5.0
"""Bounds of the time in which a broken connection may come back unnoticed."""


class RoundTimings(msgspec.Struct, kw_only=True):
    """Running means of one job. Changed by the functions below and by `pace.py` only."""

    spread_s: float | None = None
    """Seconds between the first and the last join of a round."""
    period_s: float | None = None
    """Seconds between two commits."""
    duration_s: dict[str, float] = {}
    """Seconds from plan to verdict, by route."""
    step_s: dict[str, float] = {}
    """Seconds of one optimizer step, by member."""
    reports: dict[str, int] = {}
    """In how many rounds each member told its speed."""
    busy_s: dict[str, float] = {}
    """Seconds of work, in all, from which its speed is known."""


@dataclass(frozen=True)
class FixedWaits:
    """Waits that are chosen instead of measured, for members that share one process."""

    grace_s: float
    """How long the rest is awaited after the first join of a round."""
    hold_s: float
    """How long a round waits for a member that takes over the state."""
    timeout_s: float
    """How long a reduce may take."""


def mean(old: float | None, new: float, *, weight: float = EMA) -> float:
    """Return the running mean with one more measurement in it."""
    return new if old is None else (1 - weight) * old + weight * new


def learn_spread(timings: RoundTimings, spread_s: float) -> None:
    """Take a measured spread of joins into the mean; a pause within a round is no spread."""
    if timings.period_s is not None:
        spread_s = min(spread_s, 2 * timings.period_s)
    timings.spread_s = mean(timings.spread_s, spread_s)


def grace_s(timings: RoundTimings, *, first_s: float) -> float:
    """Return how long joins are waited for after the first one came.

    Args:
        timings: Of the job.
        first_s: What holds before anything was committed.
    """
    if timings.spread_s is None or not timings.duration_s:
        return first_s
    share_s = min(MAX_PERIOD_SHARE_S, (timings.period_s or 0.0) / 4)
    return MIN_GRACE_S + 3 * timings.spread_s + share_s


def hold_s(timings: RoundTimings) -> float:
    """Return how long a round waits for a member that takes over the state."""
    return min(MAX_HOLD_S, max(MIN_HOLD_S, timings.period_s or 0.0))


def broken_s(timings: RoundTimings) -> float:
    """Return how long an awaited member may be without a connection.

    A tenth of a period is cheap beside what the member would lose if the round went on without it.
    """
    return min(MAX_BROKEN_S, max(BROKEN_S, (timings.period_s or 0.0) / 10))


def timeout_s(timings: RoundTimings, route: str, *, patience: float = 1.0) -> float:
    """Return how long a reduce on a route may take; `patience` grows with failed attempts."""
    duration = timings.duration_s.get(route)
    usual = FIRST_TIMEOUT_S if duration is None else MIN_TIMEOUT_S + 4 * duration
    return min(MAX_TIMEOUT_S, usual * patience)
