"""The geometric median: the point with the least sum of distances to all contributions.

Weiszfeld's iteration, smoothed as in Pillutla et al. 2019, "Robust Aggregation for Federated
Learning" (https://arxiv.org/abs/1912.13445), algorithm 2.
"""

from __future__ import annotations

from atoll.reducer.rules.distances import Squares, distances_from

ROUNDS = 200
EXACT = 1e-9
"""Largest change of a factor at which the iteration ends."""
SMOOTHING = 1e-6
"""Lower bound of a distance, as a share of the mean distance."""


def geometric_median(squares: Squares) -> list[float]:
    """Return the factors of the contributions, which add up to 1, from their squared distances."""
    n = len(squares)
    factors = [1.0 / n] * n
    for _ in range(ROUNDS):
        away = distances_from(squares, factors)
        least = SMOOTHING * sum(away) / n
        if least == 0.0:
            return factors  # all contributions are equal
        pulls = [1.0 / max(far, least) for far in away]
        total = sum(pulls)
        before, factors = factors, [pull / total for pull in pulls]
        if max(abs(a - b) for a, b in zip(before, factors, strict=True)) < EXACT:
            break
    return factors
