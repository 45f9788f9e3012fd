"""Each path reads its own documents, and none that are held out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.data import Assignment, BatchStream, PathShards, Shards
from atoll.errors import ConfigError, DataError

LENGTHS = [40, 7, 55, 23, 31, 60, 12, 90, 33, 21]
OWNERS = [0, 0, 1, 1, 0, 0, 1, 1, 0, 1]


def corpus(owners: list[list[int]] | None = None) -> tuple[torch.Tensor, Assignment]:
    bounds = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int64)
    paths = np.array(owners or [[owner] for owner in OWNERS], dtype=np.int32)
    return torch.arange(int(bounds[-1])), Assignment(bounds, paths, 2)


def ids(assignment: Assignment, path: int) -> set[int]:
    bounds = assignment.bounds
    return {t for d in assignment.documents(path) for t in range(bounds[d], bounds[d + 1])}


def test_a_path_reads_its_own_documents_only() -> None:
    tokens, assignment = corpus()
    shards = PathShards(tokens, assignment, context=4, seed=1)
    for path in range(2):
        count = shards.num_windows(path)
        inputs, targets = shards.batch(path, np.arange(count))
        assert set(inputs.flatten().tolist()) <= ids(assignment, path)
        assert inputs.numel() >= len(ids(assignment, path)) - 4 - 1
        assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_what_is_held_out_is_never_trained_on() -> None:
    tokens, assignment = corpus()
    shards = PathShards(tokens, assignment, context=4, seed=1, held_out=0.2)
    for path in range(2):
        stream = BatchStream(shards, slot=path, batch=4)
        seen = {t for _ in range(60) for t in next(stream)[1].flatten().tolist()}
        held = {t for _, y in shards.held_out(path, batch=2) for t in y.flatten().tolist()}
        assert held
        assert not seen & held
        assert held | seen <= ids(assignment, path)


def test_a_shared_document_is_held_out_on_both_paths() -> None:
    tokens, assignment = corpus([[0, 1] for _ in LENGTHS])
    shards = PathShards(tokens, assignment, context=4, seed=3, held_out=0.3)
    first, second = (shards.path(path).held_out for path in range(2))
    assert np.array_equal(first, second)


def test_a_single_document_is_cut_to_hold_some_of_it_out() -> None:
    assignment = Assignment(np.array([0, 100]), np.array([[0]], dtype=np.int32), 1)
    shards = PathShards(torch.arange(100), assignment, context=4, seed=1, held_out=0.1)
    found = shards.path(0)
    assert found.train.tolist() == list(range(90))
    assert found.held_out.tolist() == list(range(90, 100))


def test_paths_without_enough_tokens_are_named() -> None:
    tokens, assignment = corpus()
    poor = Assignment(assignment.bounds, assignment.paths, 3)
    with pytest.raises(DataError, match="path 2: 0"):
        PathShards(tokens, poor, context=4, seed=1)


def test_an_assignment_of_another_corpus_is_refused() -> None:
    tokens, assignment = corpus()
    with pytest.raises(DataError, match="beyond the end"):
        PathShards(tokens[:-1], assignment, context=4, seed=1)


def test_weights_are_the_tokens_of_each_path() -> None:
    tokens, assignment = corpus()
    weights = PathShards(tokens, assignment, context=4, seed=1).weights
    assert sum(weights) == pytest.approx(2)
    assert weights[0] / weights[1] == pytest.approx(
        len(ids(assignment, 0)) / len(ids(assignment, 1))
    )
    with pytest.raises(ConfigError, match="no such path"):
        PathShards(tokens, assignment, context=4, seed=1).num_windows(2)


def test_blocks_are_dealt_evenly_without_an_assignment() -> None:
    tokens = torch.arange(5000)
    shards = Shards(tokens, slots=4, context=8, seed=2)
    assignment = shards.assignment()
    assert len(set(assignment.tokens().tolist())) <= 2
    starts = shards.starts(2, np.arange(shards.num_windows(2)))
    assert set(starts.tolist()) <= ids(assignment, 2)
