"""Microbatches by number are the batches of the stream, in any order."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data import BatchStream, HeldOut, Shards
from atoll.data.microbatches import HeldOutMicrobatches, Microbatches
from atoll.errors import ConfigError, DataError


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


@given(tokens=st.integers(9, 90), rows=st.integers(1, 7), limit=st.integers(1, 90))
def test_held_out_rows_by_number_are_those_of_evaluations(
    tokens: int, rows: int, limit: int
) -> None:
    """First those of an evaluation in between, then all."""
    batches = partial(HeldOut(torch.arange(tokens), 1.0).batches, context=4)
    found = HeldOutMicrobatches(batches, rows=rows, limit_tokens=limit)
    few, all_ = list(batches(batch=rows, limit_tokens=limit)), list(batches(batch=rows))
    assert found.sizes == (len(few), len(all_))
    for number, (inputs, targets) in enumerate([*few, *all_]):
        assert torch.equal(found(number)[0], inputs)
        assert torch.equal(found(number)[1], targets)
    with pytest.raises(IndexError):
        found(len(few) + len(all_))


def test_too_little_held_out_text_is_refused() -> None:
    batches = partial(HeldOut(torch.arange(4), 1.0).batches, context=4)
    with pytest.raises(DataError, match="too little held-out text"):
        HeldOutMicrobatches(batches, rows=2, limit_tokens=8)
