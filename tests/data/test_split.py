import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.data.split import split_text
from atoll.errors import ConfigError, DataError


def numbered(size: int) -> bytes:
    """Text in which every aligned 8 bytes occur once."""
    return b"".join(b"%07d\n" % number for number in range(-(-size // 8)))[:size]


@given(size=st.integers(128, 30_000), share=st.floats(0.01, 0.9), seed=st.integers(0, 2**63))
def test_every_byte_is_in_exactly_one_part(size: int, share: float, seed: int) -> None:
    text = numbered(size)
    split = split_text(text, share=share, seed=seed)
    blocks = [
        text[start : start + split.block_bytes] for start in range(0, size, split.block_bytes)
    ]
    held = set(split.held_out_blocks)
    assert split.held_out == b"".join(b for i, b in enumerate(blocks) if i in held)
    assert split.train == b"".join(b for i, b in enumerate(blocks) if i not in held)
    assert split.held_out
    assert split.train


@given(size=st.integers(20_000, 60_000), share=st.floats(0.02, 0.5))
def test_held_out_share_is_about_what_was_asked(size: int, share: float) -> None:
    split = split_text(numbered(size), share=share, seed=1)
    assert len(split.held_out) / size == pytest.approx(share, abs=0.011)


def test_held_out_text_depends_on_the_seed_alone() -> None:
    text = numbered(50_000)
    one, again, other = (split_text(text, share=0.1, seed=seed) for seed in (4, 4, 5))
    assert one == again
    assert one.held_out_blocks != other.held_out_blocks


def test_the_choice_never_changes_between_versions() -> None:
    assert split_text(numbered(6400), share=0.04, seed=7).held_out_blocks == CHOSEN


CHOSEN = (23, 24, 44, 74)


def test_cap_limits_what_is_held_out() -> None:
    assert len(split_text(numbered(80_000), share=0.5, seed=1, cap_bytes=4_000).held_out) == 4_000
    assert len(split_text(numbered(80_000), share=0.5, seed=1, cap_bytes=1).held_out) == 400


def test_too_small_a_text_names_both_sizes() -> None:
    with pytest.raises(DataError, match=r"given: 127 bytes; expected: at least 128 bytes"):
        split_text(numbered(127), share=0.05, seed=1)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 5.0])
def test_share_outside_zero_to_one_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(share))):
        split_text(numbered(5000), share=share, seed=1)
