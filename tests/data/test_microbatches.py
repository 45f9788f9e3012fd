"""Microbatches by number are the batches of the stream, in any order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import BatchStream, Shards
from atoll.data.microbatches import Microbatches
from atoll.errors import ConfigError


def one_shard() -> Shards:
    return Shards(torch.arange(200), slots=1, context=4, seed=7)


@given(rows=st.integers(1, 9), count=st.integers(1, 9), data=st.data())
def test_microbatches_of_a_step_are_its_batch(rows: int, count: int, data: st.DataObject) -> None:
    stream = BatchStream(one_shard(), slot=0, batch=rows * count)
    batches = [next(stream) for _ in range(12)]
    found = Microbatches(one_shard(), rows=rows, count=count)
    for step in data.draw(st.permutations(range(12))):
        parts = {i: found(step, i) for i in data.draw(st.permutations(range(count)))}
        for place, whole in enumerate(batches[step]):
            assert torch.equal(torch.cat([parts[i][place] for i in range(count)]), whole)


@pytest.mark.parametrize(("rows", "count"), [(0, 1), (1, 0)])
def test_empty_microbatches_are_refused(rows: int, count: int) -> None:
    with pytest.raises(ConfigError, match="without rows"):
        Microbatches(one_shard(), rows=rows, count=count)
