"""k-means, deterministic on every machine: the first router of DiPaCo (arXiv 2403.10616)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.data.order import hashes
from atoll.errors import ConfigError, DataError

Points = NDArray[np.float64]

ROUNDS = 50
"""Most passes of Lloyd's algorithm; it usually stops earlier because nothing changes."""

RESTARTS = 4
CANDIDATES = 4
"""Points drawn for each new centroid, of which the best is taken (greedy k-means++)."""

_KEY = 0x6B6D656E


def k_means(points: Points, clusters: int, *, seed: int) -> Points:
    """Return the centroids of Lloyd's algorithm, float64 ``(clusters, width)``.

    Seeded by k-means++ (Arthur and Vassilvitskii, 2007), the best of a few starts. A cluster that
    becomes empty restarts at the point that is farthest from its own centroid.

    Raises:
        DataError: there are fewer points than clusters, or no number is one.
    """
    wrong = int((~np.isfinite(points)).sum())
    if len(points) < clusters or wrong:
        raise DataError(
            "these features cannot be clustered",
            given=f"{len(points)} documents, {wrong} numbers that are not finite",
            expected=f"at least {clusters} documents, one per path and level, of finite numbers",
            remedy="more text, shorter pieces (--longest) or fewer modules",
        )
    tries = (_lloyd(points, _plus_plus(points, clusters, (seed, n))) for n in range(RESTARTS))
    return min(tries, key=lambda found: found[1])[0]


def _lloyd(points: Points, centroids: Points) -> tuple[Points, float]:
    """Return centroids that no further pass improves, and the sum of squared distances."""
    members = np.full(len(points), -1)
    total = 0.0
    for _ in range(ROUNDS):
        far = _squared_distances(points, centroids)
        nearest = far.argmin(axis=1)
        own = far[np.arange(len(points)), nearest]
        total = float(own.sum())
        for cluster in range(len(centroids)):
            if not (nearest == cluster).any():
                lost = int(own.argmax())
                nearest[lost], own[lost] = cluster, 0.0
        if (nearest == members).all():
            break
        members = nearest
        for cluster in range(len(centroids)):
            inside = points[members == cluster]
            if len(inside):  # a point that was moved may have left its cluster empty again
                centroids[cluster] = inside.mean(axis=0)
    return centroids, total


def product_k_means(points: Points, modules: Sequence[int], *, seed: int) -> list[Points]:
    """Cluster parts of the features on their own: one part per level, one cluster per module.

    Returns:
        Centroids of each level, ``(modules of the level, width of its part)``; the widths sum to
        that of `points`.

    Raises:
        ConfigError: there are more levels than features.
        DataError: as :func:`k_means`.
    """
    if len(modules) > points.shape[1] or not modules or min(modules) < 1:
        raise ConfigError(
            "features cannot be cut into one part per level",
            given=f"{points.shape[1]} features, modules {list(modules)}",
            expected="levels of one module or more, and a feature for each level",
        )
    parts = np.array_split(points, len(modules), axis=1)
    return [
        k_means(part, count, seed=seed + 7919 * level)
        for level, (part, count) in enumerate(zip(parts, modules, strict=True))
    ]


def _plus_plus(points: Points, clusters: int, key: tuple[int, int]) -> Points:
    draws = hashes(clusters * CANDIDATES, key=(_KEY, *key)).astype(np.float64) / 2.0**64
    chosen = [int(draws[0] * len(points))]
    far = _squared_distances(points, points[chosen]).min(axis=1)
    for start in range(CANDIDATES, clusters * CANDIDATES, CANDIDATES):
        total = far.cumsum()
        wanted = draws[start : start + CANDIDATES]
        tried = np.searchsorted(total, wanted * total[-1], side="right")
        tried = tried.clip(max=len(points) - 1)  # all 0: the rest is equal to a centroid
        nearer = np.minimum(far[:, None], _squared_distances(points, points[tried]))
        best = int(nearer.sum(axis=0).argmin())
        chosen.append(int(tried[best]))
        far = nearer[:, best]
    return points[chosen].copy()


def _squared_distances(points: Points, centroids: Points) -> Points:
    distances: Points = np.stack(
        [((points - centroid) ** 2).sum(axis=1) for centroid in centroids], axis=1
    )
    return distances
