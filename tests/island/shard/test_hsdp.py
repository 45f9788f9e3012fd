"""Shards along one axis and copies along another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.island.pool import Ranks
from tests.island.reference import assert_same, batch_for, divided, gpt, plain, spread

AXES = {"replicate": 2, "shard": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt", {}),
        ("gpt", {"accumulate": 2}),
        ("untied", {"accumulate": 2, "reshard": False}),
        ("perceptron", {"recompute": "full"}),
    ],
)
@pytest.mark.every(3)
def test_gradients_equal_those_of_one_device(
    ranks: Ranks, name: str, words: dict[str, Any]
) -> None:
    loss, expected = plain(name)
    for found_loss, found, names in ranks.run(4, spread, name, AXES, words):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert names == list(expected)
        assert_same(found, expected)


def _copies(accumulate: int) -> tuple[tuple[int, ...], Tensor]:
    """Return the place of this rank, and its part of all gradients in the second step."""
    model = gpt()
    batch, parts = batch_for(model), divided(model, AXES, accumulate=accumulate)
    parts.backward(*batch)
    parts.backward(*batch)
    own = []
    for parameter in parts.parameters().values():
        assert isinstance(parameter.grad, DTensor)
        own.append(parameter.grad.to_local().flatten())
    place = tuple(parts.mesh.get_local_rank(axis) for axis in ("replicate", "shard"))
    return place, torch.cat(own)


def test_copies_of_a_shard_have_the_same_gradients_bit_for_bit(ranks: Ranks) -> None:
    found = dict(ranks.run(4, _copies, 2))
    assert set(found) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    for shard in (0, 1):
        assert torch.equal(found[0, shard], found[1, shard])
    assert not torch.equal(found[0, 0], found[0, 1])
