import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.data import BatchStream, Cursor, Shards
from atoll.errors import ConfigError, DataError


def some_shards(seed: int = 7, slots: int = 2) -> Shards:
    return Shards(torch.arange(400), slots=slots, context=4, seed=seed)


def first_tokens(batch: tuple[Tensor, Tensor]) -> list[int]:
    return [int(token) for token in batch[0][:, 0]]


def test_targets_are_the_inputs_shifted_by_one() -> None:
    inputs, targets = next(BatchStream(some_shards(), slot=0, batch=3))
    assert inputs.shape == targets.shape == (3, 4)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


@given(batch=st.integers(1, 70), slot=st.integers(0, 1), passes=st.integers(1, 3))
def test_every_window_comes_once_per_pass(batch: int, slot: int, passes: int) -> None:
    shards = some_shards()
    size = shards.num_windows(slot)
    stream = BatchStream(shards, slot=slot, batch=batch)
    seen: list[int] = []
    while len(seen) < passes * size:
        seen += first_tokens(next(stream))
    orders = [seen[start : start + size] for start in range(0, passes * size, size)]
    assert all(len(set(order)) == size for order in orders)
    assert all(set(order) == set(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == passes


@given(
    before=st.integers(0, 40),
    batch=st.integers(1, 9),
    later_batch=st.integers(1, 9),
    slot=st.integers(0, 1),
)
def test_stream_goes_on_from_any_cursor(
    before: int, batch: int, later_batch: int, slot: int
) -> None:
    stream = BatchStream(some_shards(), slot=slot, batch=batch)
    for _ in range(before):
        next(stream)
    saved = Cursor.from_dict(json.loads(json.dumps(stream.cursor.to_dict())))
    same = BatchStream(some_shards(), slot=slot, batch=batch, cursor=saved)
    other = BatchStream(some_shards(), slot=slot, batch=later_batch, cursor=saved)
    expected = [token for _ in range(30) for token in first_tokens(next(stream))]
    assert [token for _ in range(30) for token in first_tokens(next(same))] == expected
    assert stream.cursor == same.cursor
    resized = [token for _ in range(30) for token in first_tokens(next(other))]
    common = min(len(expected), len(resized))
    assert resized[:common] == expected[:common]


def test_slots_of_one_pass_share_no_window() -> None:
    shards = some_shards(slots=4)
    seen: list[int] = []
    for slot in range(4):
        seen += first_tokens(next(BatchStream(shards, slot=slot, batch=shards.num_windows(slot))))
    assert len(set(seen)) == len(seen)


def test_seed_changes_the_order() -> None:
    one, other = (next(BatchStream(some_shards(seed), slot=0, batch=8)) for seed in (1, 2))
    assert first_tokens(one) != first_tokens(other)


def test_cursor_of_another_slot_is_refused() -> None:
    with pytest.raises(DataError, match=r"given: slot 1, window 3; expected: slot 0"):
        BatchStream(some_shards(), slot=0, batch=2, cursor=Cursor(1, 0, 3))


def test_cursor_behind_the_end_is_refused() -> None:
    size = some_shards().num_windows(0)
    with pytest.raises(DataError, match=f"window below {size}"):
        BatchStream(some_shards(), slot=0, batch=2, cursor=Cursor(0, 0, size))


def test_empty_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch is too small"):
        BatchStream(some_shards(), slot=0, batch=0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"slot": 1, "data_pass": 0},
        {"slot": 1, "data_pass": 0, "offset": -1},
        {"slot": 1, "data_pass": 0, "offset": "2"},
        {"slot": 1, "data_pass": 0, "offset": True},
        {"slot": 1, "data_pass": 0, "offset": 2, "more": 3},
    ],
)
def test_broken_cursor_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(DataError, match="not a position in the data"):
        Cursor.from_dict(values)
