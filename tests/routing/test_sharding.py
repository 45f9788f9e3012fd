import numpy as np
import pytest

from atoll.data.assignment import NO_PATH
from atoll.errors import ConfigError, DataError
from atoll.routing.sharding import assign, first_shards, reshard, shard_words


def planted(each: int, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    centres = 10 * np.random.default_rng(1).normal(size=(4, 6))
    kinds = np.repeat(np.arange(4), each)
    noise = np.random.default_rng(seed).normal(size=(4 * each, 6))
    return (centres[kinds] + noise).astype(np.float32), kinds


def bounds_of(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths)))


def test_first_shards_are_the_planted_kinds() -> None:
    features, kinds = planted(25)
    _, made = first_shards(features, bounds_of(np.full(100, 8)), (2, 2), seed=0)
    assert len(set(zip(kinds, made.paths[:, 0], strict=True))) == 4
    assert (made.paths[:, 0] != made.paths[:, 1]).all()


def test_the_same_features_give_the_same_shards() -> None:
    features, _ = planted(25)
    made = [first_shards(features, bounds_of(np.full(100, 8)), (2, 2), seed=5)[1] for _ in "ab"]
    assert np.array_equal(made[0].paths, made[1].paths)


def test_resharding_follows_the_losses() -> None:
    features, kinds = planted(25)
    seen, theirs = planted(6, seed=9)
    best = np.array([2, 3, 1, 0])
    losses = np.full((24, 4), 3.0)
    losses[np.arange(24), best[theirs]] = 2.0
    router, made = reshard(losses, seen, features, bounds_of(np.full(100, 8)), modules=(2, 2))
    assert np.array_equal(made.paths[:, 0], best[kinds])
    assert np.array_equal(router.choose(features), best[kinds])


def test_no_shard_is_larger_than_its_limit() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(1, 50, size=400)
    scores = random.normal(size=(400, 5)) + np.array([4.0, 0, 0, 0, 0])
    made = assign(scores, bounds_of(lengths), copies=2, slack=1.1)
    for copy in range(2):
        share = np.bincount(
            made.paths[:, copy][made.paths[:, copy] > NO_PATH],
            weights=lengths[made.paths[:, copy] > NO_PATH],
            minlength=5,
        )
        assert share.max() <= 1.1 * lengths.sum() / 5


def test_documents_with_room_get_their_two_best_paths() -> None:
    scores = np.random.default_rng(0).normal(size=(60, 3))
    made = assign(scores, bounds_of(np.ones(60, dtype=int)), copies=2, slack=3.0)
    assert np.array_equal(made.paths, np.argsort(-scores, axis=1)[:, :2])


def test_who_loses_most_chooses_first() -> None:
    scores = np.array([[1.0, 0.9], [1.0, 0.0]])
    made = assign(scores, bounds_of(np.array([5, 5])), copies=1, slack=1.0)
    assert made.paths[:, 0].tolist() == [1, 0]


def test_a_document_larger_than_a_shard_is_assigned() -> None:
    made = assign(np.zeros((3, 2)), bounds_of(np.array([1000, 1, 1])), copies=2, slack=1.0)
    assert (made.paths[:, 0] > NO_PATH).all()


def test_alike_documents_fill_all_shards() -> None:
    features = np.ones((40, 4), dtype=np.float32)
    _, made = first_shards(features, bounds_of(np.full(40, 3)), (2, 2), seed=0, copies=1)
    assert np.bincount(made.paths[:, 0], minlength=4).tolist() == [10, 10, 10, 10] or (
        np.bincount(made.paths[:, 0], minlength=4).max() <= 13
    )


@pytest.mark.parametrize(("copies", "slack"), [(0, 1.2), (5, 1.2), (1, 0.9)])
def test_impossible_shards_are_refused(copies: int, slack: float) -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        assign(np.zeros((9, 4)), bounds_of(np.ones(9, dtype=int)), copies=copies, slack=slack)


def test_fewer_documents_than_paths_are_refused_in_words() -> None:
    with pytest.raises(DataError, match="shorter pieces"):
        first_shards(planted(1)[0][:3], bounds_of(np.ones(3, dtype=int)), (2, 2), seed=0)
    with pytest.raises(DataError, match="fewer documents than paths"):
        assign(np.zeros((3, 4)), bounds_of(np.ones(3, dtype=int)))


def test_words_name_domains_and_empty_shards() -> None:
    scores = np.array([[1.0, 0.0, -9.0]] * 2 + [[0.0, 1.0, -9.0]] * 2)
    made = assign(scores, bounds_of(np.ones(4, dtype=int)), copies=1, slack=2.0)
    lines = shard_words(made, ["c", "c", "html", "c"])
    assert lines[0] == "path 0: 2 documents, 2 tokens (c 100%)"
    assert "c 50%" in lines[1]
    assert "empty shard" in lines[2]
