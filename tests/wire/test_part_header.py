"""What a part says about itself is read without trust: any bytes give an answer."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.wire.manifest import checkpoint_folder, member_part, round_of, stamp_of
from atoll.wire.part_header import read_metadata, read_score, read_stamp


def part(header: object, *, data: bytes = b"") -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


GOOD = {
    "__metadata__": {"stamp": "s", "score": "1.25"},
    "v": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
}


def test_texts_of_a_whole_part_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(part(GOOD, data=b"abc"))
    assert read_metadata(path) == {"stamp": "s", "score": "1.25"}
    assert read_stamp(path) == "s"
    assert read_score(path) == 1.25


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x", struct.pack("<Q", 2**60), part(GOOD, data=b"ab"), part(GOOD, data=b"abcd"),
        part([]), part({"v": {"data_offsets": "no"}}), part({"v": 3}), part({"v": {}}),
        part({"v": {"data_offsets": [0]}}),
    ],
)  # fmt: skip
def test_what_is_not_a_whole_part_says_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    assert read_metadata(path) == {}
    assert read_stamp(path) == ""
    assert read_score(path) is None


def test_missing_part_says_nothing(tmp_path: Path) -> None:
    assert read_stamp(tmp_path / "absent") == ""
    assert read_stamp(tmp_path) == ""


@pytest.mark.parametrize("score", ["", "nan", "inf", "-inf", "much"])
def test_score_that_is_no_number_is_none(tmp_path: Path, score: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(part({"__metadata__": {"score": score}}))
    assert read_score(path) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_answered(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    assert isinstance(read_metadata(path), dict)


def test_rounds_are_read_from_names_of_folders_only() -> None:
    assert round_of(checkpoint_folder(12)) == 12
    assert round_of(checkpoint_folder(12) + "-replaced") == 12
    assert round_of("round-1234567") == 1234567
    for name in ("round-9", "round-x", "round-000008.bak", "other", "", "round-00000-1"):
        assert round_of(name) is None


def test_stamp_names_equal_states_once() -> None:
    assert stamp_of(round_=3, step=30, states=["a", "a"]) == "round 3, step 30, state a"
    assert stamp_of(round_=3, step=30, states=["b", "a"]) != stamp_of(
        round_=3, step=30, states=["a"]
    )
    assert member_part("w3") == "w3.safetensors"
