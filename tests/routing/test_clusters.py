import numpy as np
import pytest

from atoll.errors import ConfigError, DataError
from atoll.routing.clusters import k_means, product_k_means


def planted(clusters: int, each: int, *, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(clusters)
    centres = 20 * random.normal(size=(clusters, width))
    members = np.repeat(np.arange(clusters), each)
    return centres[members] + random.normal(size=(len(members), width)), members


@pytest.mark.parametrize("clusters", [1, 2, 7])
def test_planted_clusters_are_found(clusters: int) -> None:
    points, members = planted(clusters, 30)
    centroids = k_means(points, clusters, seed=1)
    nearest = ((points[:, None] - centroids) ** 2).sum(2).argmin(1)
    assert len(set(zip(members, nearest, strict=True))) == clusters


def test_the_same_seed_gives_the_same_centroids() -> None:
    points, _ = planted(5, 40)
    assert np.array_equal(k_means(points, 9, seed=4), k_means(points.copy(), 9, seed=4))


def test_an_empty_cluster_restarts_at_the_farthest_point() -> None:
    # Almost all points are equal: k-means++ can only draw the rest once each.
    points = np.zeros((50, 2))
    points[-3:] = [[5, 0], [0, 7], [9, 9]]
    centroids = k_means(points, 4, seed=0)
    nearest = ((points[:, None] - centroids) ** 2).sum(2).argmin(1)
    assert len(set(nearest)) == 4


def test_equal_points_end_with_equal_centroids() -> None:
    assert np.array_equal(k_means(np.ones((6, 3)), 4, seed=0), np.ones((4, 3)))


@pytest.mark.parametrize("points", [np.zeros((3, 2)), np.full((9, 2), np.nan)])
def test_what_cannot_be_clustered_is_refused(points: np.ndarray) -> None:
    with pytest.raises(DataError, match="cannot be clustered"):
        k_means(points, 4, seed=0)


def test_levels_cluster_their_own_part_of_the_features() -> None:
    left, members = planted(3, 40, width=4)
    right, others = planted(2, 60, width=4)
    order = np.random.default_rng(0).permutation(120)
    points = np.concatenate((left, right[order]), axis=1)
    centroids = product_k_means(points, (3, 2), seed=0)
    assert [level.shape for level in centroids] == [(3, 4), (2, 4)]
    for part, level, true in (
        (left, centroids[0], members),
        (right[order], centroids[1], others[order]),
    ):
        nearest = ((part[:, None] - level) ** 2).sum(2).argmin(1)
        assert len(set(zip(true, nearest, strict=True))) == len(level)


@pytest.mark.parametrize("modules", [(), (0, 2), (2,) * 9])
def test_levels_without_features_are_refused(modules: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="one part per level"):
        product_k_means(np.zeros((100, 8)), modules, seed=0)
