"""Centred clipping: no contribution moves the result further than tau.

Karimireddy et al. 2021, "Learning from History for Byzantine Robust Optimization"
(https://arxiv.org/abs/2012.10333), algorithm 2: v += 1/n sum (x_i - v) min(1, tau / |x_i - v|),
repeated; v starts at the last round's result.
"""

from __future__ import annotations

from atoll.reducer.rules.distances import Squares, distances_from


def centred_clipping(squares: Squares, *, radius: float, rounds: int) -> list[float]:
    """Return factors of the start v and of the n contributions; they add up to 1.

    `squares` are (n + 1) x (n + 1) with the start first; `radius` is tau, `rounds` the iterations.
    """
    n = len(squares) - 1
    factors = [1.0] + [0.0] * n
    for _ in range(rounds):
        away = distances_from(squares, factors)[1:]
        shares = [(min(1.0, radius / far) if far > 0 else 1.0) / n for far in away]
        stays = 1.0 - sum(shares) if any(far > radius for far in away) else 0.0
        factors = [stays * factor for factor in factors]
        for index, share in enumerate(shares, start=1):
            factors[index] += share
    return factors
