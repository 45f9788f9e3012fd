"""Measured times of a job's rounds, and the time limits derived from them.

The grace for joins is proportional to the measured spread of joins, the limit of a reduce to its
measured duration. The measurements are stored with the job, so that a restarted hub keeps them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from atoll.rounds.faster_route import FasterRoute

EMA = 0.3
"""Weight of the newest measurement in the moving averages."""

FIRST_TIMEOUT_S = 120.0
"""Limit of a reduce on a route that has not been measured."""
MIN_TIMEOUT_S, MAX_TIMEOUT_S = 5.0, 300.0
"""Bounds of the limit of a measured route; one whose reduces take longer gets twice their time."""
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
    round_s: float | None = None
    """Seconds that a round takes beside training, from the last member's begin to the verdict."""
    round_dev_s: float = 0.0
    """Mean absolute deviation of it."""
    faster_route: FasterRoute = msgspec.field(default_factory=FasterRoute)


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


def learn_round(timings: RoundTimings, seconds: float) -> None:
    """Update the duration of a round and its deviation, as TCP does (RFC 6298, section 2)."""
    if timings.round_s is None:
        timings.round_s, timings.round_dev_s = seconds, seconds / 4
        return
    deviation = abs(seconds - timings.round_s)
    timings.round_dev_s = mean(timings.round_dev_s, deviation)
    timings.round_s = mean(timings.round_s, seconds)


def expect_round(timings: RoundTimings, seconds: float) -> None:
    """Take a predicted duration as the first measured one: lines are not what they were."""
    timings.round_s = None
    learn_round(timings, seconds)


def hiding_steps(timings: RoundTimings, *, step_s: float) -> int:
    """Return the steps of `step_s` seconds that hide a round; 0 if it has not been measured.

    Twice the deviation is added: a round that takes longer lets all members wait.
    """
    if timings.round_s is None or not step_s > 0:
        return 0
    return max(1, math.ceil((timings.round_s + 2 * timings.round_dev_s) / step_s))


def grace_s(timings: RoundTimings, *, first_s: float) -> float:
    """Return the seconds for which joins are awaited after the first; `first_s` if unmeasured."""
    if timings.spread_s is None or not timings.duration_s:
        return first_s
    share_s = min(MAX_PERIOD_SHARE_S, (timings.period_s or 0.0) / 4)
    return MIN_GRACE_S + 3 * timings.spread_s + share_s


def quorum_grace_s(timings: RoundTimings, *, waiting: int, missing: int) -> float | None:
    """Return for how long members that are a quorum wait for the rest; None: no limit is known.

    A member left out loses the work of a period. So the wait may cost those that wait as much in
    all, and no more: that is at most twice the cost of the better choice, whenever the others come
    (the ski-rental problem; Karlin et al. 1988, https://doi.org/10.1007/BF01762111). Decoupled
    DiLoCo (https://arxiv.org/abs/2604.21428) also waits for a quorum and then a grace, but takes it
    from the slack of a synchronisation that runs beside training; here training rests meanwhile.
    """
    if timings.period_s is None:
        return None
    return timings.period_s * missing / waiting


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
    if duration is None:
        return FIRST_TIMEOUT_S * patience
    return min(MIN_TIMEOUT_S + 4 * duration, max(MAX_TIMEOUT_S, 2 * duration)) * patience
