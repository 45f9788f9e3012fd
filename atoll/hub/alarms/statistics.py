"""Statistics that one bad value cannot bend."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

MAD_TO_SIGMA = 1.4826
"""Median absolute deviation of a normal distribution to its standard deviation."""


def spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation."""
    centre = statistics.median(values)
    return MAD_TO_SIGMA * statistics.median([abs(value - centre) for value in values])


def noise(values: Sequence[float]) -> float:
    """Return the standard deviation of what changes from one value to the next.

    A trend adds little to it: differences of neighbours hold twice the variance of the noise.
    """
    steps = [b - a for a, b in pairwise(values)]
    return spread(steps) / math.sqrt(2) if steps else 0.0


def outliers(value: float, others: Sequence[float], *, floor: float) -> tuple[float, float]:
    """Return how far a value lies from others: in robust deviations, and as a ratio of medians.

    Args:
        value: What is judged; not negative.
        others: At least one.
        floor: Share of the median that counts as ordinary, so that equal values are no trap.
    """
    centre = statistics.median(others)
    width = max(spread(others), floor * centre, 1e-30)
    ratio = value / centre if centre > 0 else math.inf if value > 0 else 1.0
    return (value - centre) / width, ratio


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean."""
    return math.sqrt(statistics.variance(values) / len(values)) if len(values) > 1 else math.inf
