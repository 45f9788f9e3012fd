"""Krum and multi-Krum: select the contributions closest to the others.

Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent"
(https://arxiv.org/abs/1703.02757), section 4. A contribution's score is the sum of its squared
distances to the n - f - 2 nearest others. Differs from the paper: multi-Krum averages the n - f
best by default, so that with f = 0 it is the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from atoll.reducer.rules.distances import Squares


def krum(squares: Squares, *, bad: int, best: int, ties: Sequence[bytes]) -> list[float]:
    """Return factors that average the `best` contributions (1 for Krum) with the lowest scores.

    `squares` are n x n squared distances, n >= 2 * bad + 3. `ties` order equal scores,
    independently of the order of members.
    """
    n = len(squares)
    nearest = n - bad - 2
    scores = [
        math.fsum(sorted(square for other, square in enumerate(row) if other != index)[:nearest])
        for index, row in enumerate(squares)
    ]
    order = sorted(range(n), key=lambda index: (scores[index], ties[index]))
    chosen = set(order[:best])
    return [1.0 / best if index in chosen else 0.0 for index in range(n)]
