from __future__ import annotations

import math
import random
from typing import Any

import pytest

from atoll.codec.registry import make_codec
from atoll.errors import AtollError, ConfigError, WireError
from atoll.reducer.assembly import Assembly
from atoll.wire.chunks import ChunkHead, count_pieces, pieces
from atoll.wire.limits import CHUNK_BYTES

ELEMENTS = 2 * CHUNK_BYTES // 4 + 77
DATA = random.Random(7).randbytes(4 * ELEMENTS)


def head(index: int, elements: int = ELEMENTS, **changes: Any) -> ChunkHead:
    total = 4 * elements
    fields: dict[str, Any] = {
        "kind": "contribute", "epoch": 3, "round": 1, "index": index,
        "count": count_pieces(total), "total_bytes": total, "codec": "fp32",
        "sizes": [elements], "weight": 2.0,
    }  # fmt: skip
    return ChunkHead(**{**fields, **changes})


def fill(assembly: Assembly, member: str, *, order: list[int] | None = None) -> bool:
    cut = list(pieces(DATA))
    complete = False
    for index in order if order is not None else range(len(cut)):
        complete = assembly.add(member, head(index), cut[index])
    return complete


def test_pieces_in_any_order_and_repeated_make_the_packet() -> None:
    assembly = Assembly(["w0", "w1"])
    assert not fill(assembly, "w0", order=[2, 0, 2])
    assert assembly.have("w0") == [0, 2]
    assert list(assembly.missing) == ["w0", "w1"]
    assert fill(assembly, "w0", order=[1])
    assert list(assembly.missing) == ["w1"]
    (share,) = assembly.shares()
    assert share.packet.data == DATA
    assert share.weight == 2.0


def test_shares_come_in_member_order() -> None:
    assembly = Assembly(["w0", "w1", "w2"])
    for member in ("w2", "w0", "w1"):
        fill(assembly, member)
    assert [share.member for share in assembly.shares()] == ["w0", "w1", "w2"]


def test_lost_member_counts_only_when_complete() -> None:
    assembly = Assembly(["w0", "w1", "w2"])
    fill(assembly, "w0")
    fill(assembly, "w1", order=[0, 1])
    for member in ("w0", "w1"):
        assembly.drop(member)
    assert assembly.missing == ("w2",)
    assert [share.member for share in assembly.shares()] == ["w0"]
    assert sum(assembly.held().values()) == len(DATA)


def test_returning_member_counts_when_complete_in_time() -> None:
    assembly = Assembly(["w0", "w1"])
    assembly.drop("w1")
    fill(assembly, "w1")
    fill(assembly, "w0")
    assert [share.member for share in assembly.shares()] == ["w0", "w1"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_bytes": 4 * ELEMENTS + 4},
        {"total_bytes": 2**40, "count": count_pieces(2**40)},
        {"sizes": [ELEMENTS - 1]},
        {"sizes": [ELEMENTS + 5, -5]},
        {"codec": "int8"},
        {"count": 1},
    ],
)
def test_contribution_of_another_codec_is_refused(
    wrong: dict[str, Any],
) -> None:
    assembly = Assembly(["w0"])
    with pytest.raises(WireError):
        assembly.add("w0", head(0, **wrong), memoryview(DATA)[:CHUNK_BYTES])
    assert sum(assembly.held().values()) == 0


def test_memory_is_bounded_whatever_is_announced() -> None:
    assembly = Assembly(["w0"], max_bytes=1000)
    with pytest.raises(WireError, match="too large"):
        assembly.add("w0", head(0), memoryview(DATA)[:CHUNK_BYTES])
    assert sum(assembly.held().values()) == 0


def test_unknown_codec_and_stranger_are_refused() -> None:
    assembly = Assembly(["w0"])
    with pytest.raises(ConfigError):
        assembly.add("w0", head(0, codec="fp9"), memoryview(DATA)[:CHUNK_BYTES])
    with pytest.raises(WireError, match="outside the plan"):
        assembly.add("w9", head(0), memoryview(DATA)[:CHUNK_BYTES])


@pytest.mark.parametrize("change", [{"weight": 3.0}, {"weight": math.nan}])
def test_pieces_that_contradict_each_other_are_refused(change: dict[str, Any]) -> None:
    assembly = Assembly(["w0"])
    cut = list(pieces(DATA))
    assembly.add("w0", head(0), cut[0])
    with pytest.raises(WireError, match="contradict"):
        assembly.add("w0", head(1, **change), cut[1])


def test_refused_member_is_forgotten() -> None:
    assembly = Assembly(["w0", "w1"])
    fill(assembly, "w0")
    assembly.refuse("w0")
    assert assembly.missing == ("w1",)
    assert assembly.shares() == []
    assert sum(assembly.held().values()) == 0


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_empty_vector_is_one_empty_piece(codec: str) -> None:
    assembly = Assembly(["w0"])
    assert make_codec(codec).nbytes(0) == 0
    empty = head(0, elements=0, codec=make_codec(codec).spec)
    assert assembly.add("w0", empty, memoryview(b""))
    assert assembly.shares()[0].packet.num_elements == 0


def test_every_refusal_is_an_error_of_ours() -> None:
    assembly = Assembly(["w0"])
    chance = random.Random(3)
    for _ in range(200):
        wild = head(
            chance.choice([0, 1]),
            codec=chance.choice(["fp32", "int8", "", "x"]),
            sizes=[chance.randint(-5, 10**6) for _ in range(chance.randint(0, 3))],
            total_bytes=chance.randint(-5, 10**7),
        )
        try:
            assembly.add("w0", wild, memoryview(b"abc"))
        except AtollError:
            continue
