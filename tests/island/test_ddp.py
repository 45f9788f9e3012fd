"""Whole models on several ranks: gradients of the whole batch, on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.island.pool import Ranks
from tests.island.reference import assert_same, plain, spread


@pytest.mark.parametrize(
    ("name", "axes", "words"),
    [
        ("gpt", {"replicate": 2}, {}),
        ("gpt", {"replicate": 4}, {}),
        ("gpt", {"replicate": 2}, {"accumulate": 2}),
        ("perceptron", {"replicate": 4}, {"accumulate": 2}),
        ("gpt", {"shard": 2}, {}),
        ("gpt", {"shard": 4}, {}),
        ("gpt", {"shard": 2}, {"accumulate": 2}),
        ("untied", {"shard": 2}, {"accumulate": 2, "reshard": False}),
        ("perceptron", {"shard": 4}, {"accumulate": 2}),
        ("gpt", {"replicate": 2, "shard": 2}, {"accumulate": 2}),
        ("untied", {"replicate": 2, "shard": 2}, {"accumulate": 2, "reshard": False}),
    ],
)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, axes: dict[str, int], words: dict[str, Any]
) -> None:
    loss, expected = plain(name)
    count = axes.get("replicate", 1) * axes.get("shard", 1)
    for found_loss, found, names in ranks.run(count, spread, name, axes, words, 8, 2):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert names == list(expected)
        assert_same(found, expected)
