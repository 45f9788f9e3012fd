import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.data.order import permutation
from atoll.data.shards import Shards
from atoll.errors import ConfigError, DataError


def positions(shards: Shards, slot: int) -> set[int]:
    """Every position that any window of the slot reads, when token i is i."""
    windows = np.arange(shards.num_windows(slot))
    return set(shards.windows(slot, windows).flatten().tolist())


@given(
    num_tokens=st.integers(64, 4000),
    slots=st.integers(1, 6),
    context=st.integers(1, 9),
    seed=st.integers(0, 2**63),
    order=st.sampled_from(("shuffled", "contiguous")),
)
def test_no_token_is_in_two_shards(
    num_tokens: int, slots: int, context: int, seed: int, order: str
) -> None:
    tokens = torch.arange(num_tokens, dtype=torch.int32)
    shards = Shards(tokens, slots=slots, context=context, seed=seed, order=order)
    seen: set[int] = set()
    for slot in range(slots):
        here = positions(shards, slot)
        assert not seen & here
        seen |= here
    # Only the tail behind the last whole block is left out.
    assert seen == set(range(num_tokens // shards.block_tokens * shards.block_tokens))


@given(num_tokens=st.integers(2000, 9000), slots=st.integers(1, 5))
def test_shards_are_of_nearly_equal_size(num_tokens: int, slots: int) -> None:
    shards = Shards(torch.arange(num_tokens), slots=slots, context=4, seed=1)
    sizes = [shards.num_windows(slot) for slot in range(slots)]
    assert max(sizes) - min(sizes) <= shards.block_tokens // 4


def test_windows_are_consecutive_tokens_overlapping_by_one() -> None:
    shards = Shards(torch.arange(64), slots=1, context=3, seed=1, order="contiguous")
    first, second = shards.windows(0, np.array([0, 1])).tolist()
    assert (first, second[0]) == ([0, 1, 2, 3], 3 if shards.block_tokens > 4 else 4)


def test_contiguous_gives_each_slot_one_stretch() -> None:
    shards = Shards(torch.arange(1200), slots=3, context=4, seed=9, order="contiguous")
    for slot in range(3):
        here = positions(shards, slot)
        assert here == set(range(min(here), max(here) + 1))


def test_shuffled_spreads_each_slot_over_the_text() -> None:
    shards = Shards(torch.arange(12_000), slots=3, context=4, seed=9)
    for slot in range(3):
        assert max(positions(shards, slot)) - min(positions(shards, slot)) > 9_000


def test_the_deal_never_changes_between_versions() -> None:
    shards = Shards(torch.arange(90), slots=3, context=4, seed=7, block_tokens=9)
    dealt = [(shards.starts(slot, np.arange(0, 6, 2)) // 9).tolist() for slot in range(3)]
    assert dealt == DEALT


DEALT = [[3, 5, 6], [9, 0, 7], [4, 8, 1]]


def test_uint16_tokens_become_int64_windows() -> None:
    tokens = torch.full((400,), 65_535, dtype=torch.uint16)
    window = Shards(tokens, slots=1, context=4, seed=1).windows(0, np.array([0]))
    assert window.dtype == np.int64
    assert window.max() == 65_535


def test_too_few_tokens_names_what_is_there_and_what_is_needed() -> None:
    with pytest.raises(DataError, match=r"given: 30 tokens; expected: at least 36.*4 slots"):
        Shards(torch.arange(30), slots=4, context=8, seed=1)


def test_unknown_order_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'shuffled'"):
        Shards(torch.arange(900), slots=1, context=8, seed=1, order="shuffle")


@pytest.mark.parametrize("numbers", [(0, 8, None), (1, 0, None), (1, 8, 8)])
def test_numbers_without_sense_are_refused(numbers: tuple[int, int, int | None]) -> None:
    slots, context, block = numbers
    with pytest.raises(ConfigError, match="cannot be split"):
        Shards(torch.arange(900), slots=slots, context=context, seed=1, block_tokens=block)


def test_slot_that_does_not_exist_is_refused() -> None:
    shards = Shards(torch.arange(900), slots=2, context=8, seed=1)
    with pytest.raises(ConfigError, match="given: 2; expected: 0 to 1"):
        shards.num_windows(2)


@given(size=st.integers(0, 500), key=st.tuples(st.integers(-5, 2**64), st.integers(0, 99)))
def test_permutation_holds_every_index_once(size: int, key: tuple[int, int]) -> None:
    assert sorted(permutation(size, key=key).tolist()) == list(range(size))


def test_permutations_of_neighbouring_keys_have_little_in_common() -> None:
    orders = [permutation(2000, key=(seed, data_pass)) for seed in (1, 2) for data_pass in (0, 1)]
    for index, one in enumerate(orders):
        for other in orders[:index]:
            assert (one == other).sum() < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
