from pathlib import Path

import numpy as np
import pytest

from atoll.errors import DataError
from atoll.routing import router as routers
from atoll.routing.router import Router, balanced, clustered, fitted, read_router

MODULES = (2, 3)


def planted(each: int, *, width: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features of six kinds of documents, and their kinds."""
    centres = 12 * np.random.default_rng(7).normal(size=(6, width))
    kinds = np.repeat(np.arange(6), each)
    noise = np.random.default_rng(seed).normal(size=(len(kinds), width))
    return (centres[kinds] + noise).astype(np.float32), kinds


def one_to_one(kinds: np.ndarray, paths: np.ndarray) -> bool:
    return len(set(zip(kinds, paths, strict=True))) == 6 == len(set(paths))


def test_clusters_route_planted_kinds_without_error() -> None:
    features, kinds = planted(40)
    router = clustered(features, MODULES, seed=0)
    unseen, theirs = planted(200, seed=1)
    assert one_to_one(theirs, router.choose(unseen))
    assert one_to_one(kinds, router.choose(features))


def test_the_router_is_the_nearest_centroid() -> None:
    features, _ = planted(30)
    router = clustered(features, MODULES, seed=0)
    scaled = (features - features.mean(0)) / features.std(0)
    members = router.choose(features)
    centroids = np.stack([scaled[members == path].mean(0) for path in range(6)])
    far = ((scaled[:, None] - centroids) ** 2).sum(2)
    assert np.array_equal(far.argmin(1), members)


def test_many_paths_are_clustered_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "MOST_CLUSTERED", 5)
    random = np.random.default_rng(0)
    left, right = np.repeat([0, 1], 60), np.tile([0, 1, 2], 40)
    together = np.concatenate(
        (
            9.0 * left[:, None] + random.normal(size=(120, 4)),
            9.0 * right[:, None] + random.normal(size=(120, 4)),
        ),
        axis=1,
    )
    features = together.astype(np.float32)
    paths = clustered(features, MODULES, seed=0).choose(features)
    assert one_to_one(3 * left + right, paths)
    modules = np.unravel_index(paths, MODULES)
    assert len(set(zip(left, modules[0], strict=True))) == 2
    assert len(set(zip(right, modules[1], strict=True))) == 3


def test_the_fitted_router_finds_the_best_path_of_each_kind() -> None:
    features, kinds = planted(15)
    best = np.array([4, 2, 0, 5, 1, 3])
    losses = np.full((len(kinds), 6), 2.0)
    losses[np.arange(len(kinds)), best[kinds]] = 1.5
    unseen, theirs = planted(200, seed=3)
    chosen = fitted(features, losses, MODULES).choose(unseen)
    assert np.array_equal(chosen, best[theirs])


def test_a_text_without_a_better_path_does_not_count() -> None:
    features, kinds = planted(15)
    losses = np.full((len(kinds), 6), 2.0)  # kind 0 is equal on every path, so its label is noise
    losses[np.arange(len(kinds)), kinds] = 1.0
    losses[kinds == 0] = 2.0
    losses[kinds == 0, 5] -= 1e-9
    alone = fitted(features[kinds > 0], losses[kinds > 0], MODULES)
    both = fitted(features, losses, MODULES)
    assert np.array_equal(both.choose(features[kinds > 0]), alone.choose(features[kinds > 0]))


@pytest.mark.parametrize("losses", [np.ones((90, 5)), np.full((90, 6), np.nan)])
def test_incomplete_losses_are_refused(losses: np.ndarray) -> None:
    with pytest.raises(DataError, match="not complete"):
        fitted(planted(15)[0], losses, MODULES)


def test_a_bias_evens_out_the_shares() -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(3000, 4)).astype(np.float32)
    tokens = random.integers(1, 100, size=3000)
    router = Router((4,), random.normal(size=(4, 4)), np.array([3.0, 0.0, 0.0, -2.0]))
    before = np.bincount(router.choose(features), weights=tokens, minlength=4) / tokens.sum()
    after = balanced(router, features, tokens).choose(features)
    share = np.bincount(after, weights=tokens, minlength=4) / tokens.sum()
    assert before.max() > 0.5
    assert share.max() <= 1.25 / 4


def test_documents_that_look_alike_are_no_reason_to_fail() -> None:
    features = np.ones((50, 4), dtype=np.float32)
    router = balanced(clustered(features, (2, 2), seed=0), features, np.full(50, 10))
    assert np.isfinite(router.scores(features)).all()


def test_a_file_gives_back_the_same_router(tmp_path: Path) -> None:
    features, _ = planted(20)
    router = clustered(features, MODULES, seed=0)
    router.write(tmp_path / "router.safetensors")
    read = read_router(tmp_path / "router.safetensors")
    assert read.modules == MODULES
    assert np.array_equal(read.scores(features), router.scores(features))


def test_other_files_and_features_are_refused(tmp_path: Path) -> None:
    features, _ = planted(20)
    (tmp_path / "no").write_bytes(b"nothing")
    for name in ("no", "missing"):
        with pytest.raises(DataError, match="cannot be read"):
            read_router(tmp_path / name)
    with pytest.raises(DataError, match="not those of the router"):
        clustered(features, MODULES, seed=0).scores(features[:, 1:])
