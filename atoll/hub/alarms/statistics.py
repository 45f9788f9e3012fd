"""Robust statistics."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

MAD_TO_SIGMA = 1.4826
"""Ratio of standard deviation to median absolute deviation for a normal distribution."""


def spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation."""
    centre = statistics.median(values)
    return MAD_TO_SIGMA * statistics.median([abs(value - centre) for value in values])


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation without trend: that of differences, divided by sqrt(2)."""
    steps = [b - a for a, b in pairwise(values)]
    return spread(steps) / math.sqrt(2) if steps else 0.0


def outliers(value: float, others: Sequence[float], *, floor: float) -> tuple[float, float]:
    """Return the distance from `others`: in robust deviations, and as ratio to the median.

    Deviations below `floor` times the median are ordinary, in case all `others` are equal.
    """
    centre = statistics.median(others)
    width = max(spread(others), floor * centre, 1e-30)
    ratio = value / centre if centre > 0 else math.inf if value > 0 else 1.0
    return (value - centre) / width, ratio


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean."""
    return math.sqrt(statistics.variance(values) / len(values)) if len(values) > 1 else math.inf
