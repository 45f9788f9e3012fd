"""How many steps each member does in a period, so that all arrive together.

The number of steps follows the measured speed (DyLU, Liu et al. 2024, arXiv:2401.09135), here as a
share of the fastest member's, clamped to a quarter and with a dead band, so that noise of a
measurement changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.hub.measures import Measures, mean
from atoll.wire.messages import RoundJoin

STEP_EMA = 0.5
SLOWEST = 0.25
"""Least share of a period's steps."""
DEAD_BAND = 0.2
"""Differences below this share are taken for noise."""
GRAIN = 32
"""Shares are multiples of one over this."""
SURE_REPORTS, SURE_S = 5, 5.0
"""Reports, and seconds of work, after which a member's speed is taken for known."""
LEAST_LEFT = 0.1
"""A newcomer does nothing in a period of which less than this share is left."""


def learn_steps(measures: Measures, joins: Mapping[str, RoundJoin]) -> None:
    """Take the speed of every member that told it into the running means."""
    for member, join in joins.items():
        if join.steps > 0 and join.busy_s > 0:
            old, new = measures.step_s.get(member), join.busy_s / join.steps
            measures.step_s[member] = mean(old, new, weight=STEP_EMA)
            measures.reports[member] = measures.reports.get(member, 0) + 1
            measures.busy_s[member] = measures.busy_s.get(member, 0.0) + join.busy_s


def share_of(own_s: float, fastest_s: float) -> float:
    """Return the share of a period's steps for a member that needs `own_s` for one step."""
    if not own_s > 0 or not fastest_s > 0:
        return 1.0
    share = fastest_s / own_s
    if share >= 1.0 - DEAD_BAND:
        return 1.0
    return max(SLOWEST, round(share * GRAIN) / GRAIN)


def paces(step_s: Mapping[str, float], members: Iterable[str]) -> dict[str, float]:
    """Return the share of every member that does less than a whole period's steps."""
    known = {member: step_s[member] for member in members if member in step_s}
    fastest = min(known.values(), default=0.0)
    shares = {member: share_of(own, fastest) for member, own in known.items()}
    return {member: share for member, share in shares.items() if share < 1.0}


def too_slow(measures: Measures, members: Iterable[str]) -> dict[str, float]:
    """Return how many times slower than the fastest those are that cannot arrive in time.

    Single steps are noisy: only members are judged of which enough is known.
    """
    known = {
        m: measures.step_s[m]
        for m in members
        if measures.reports.get(m, 0) >= SURE_REPORTS and measures.busy_s.get(m, 0.0) >= SURE_S
    }
    fastest = min(known.values(), default=0.0)
    return {m: own / fastest for m, own in known.items() if fastest and own * SLOWEST > fastest}


def newcomer_pace(own_share: float, *, period_s: float | None, elapsed_s: float) -> float:
    """Return the share of steps for a member that begins in the middle of a period.

    Args:
        own_share: What it would do in a whole period.
        period_s: Measured seconds of a period; None when there is none yet: it then does nothing,
            which holds up nobody.
        elapsed_s: Seconds since the period began.
    """
    left = 0.0 if not period_s else 1.0 - elapsed_s / period_s
    return own_share * min(1.0, left) if left >= LEAST_LEFT else 0.0
