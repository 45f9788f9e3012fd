from __future__ import annotations

import array
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameTooLarge, WireError
from atoll.wire.chunks import ChunkHead, count_pieces, pack_chunk, pieces, unpack_chunk
from atoll.wire.limits import CHUNK_BYTES, MAX_RELAY_BYTES
from atoll.wire.parameter_server_frames import ServerFrameHead, pack_frame, unpack_frame


def head_of(packet_bytes: int, index: int, *, kind: str = "contribute") -> ChunkHead:
    count = count_pieces(packet_bytes)
    return ChunkHead(kind, 3, 4, index, count, packet_bytes, "int8:256", [packet_bytes], 1.5)


def payload_of(head: ChunkHead, piece: bytes | memoryview = b"") -> memoryview:
    start, rest = pack_chunk(head, piece)
    return memoryview(start + bytes(rest))


sizes = st.one_of(
    st.integers(0, 3 * CHUNK_BYTES + 5),
    st.sampled_from([0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES]),
)


@given(sizes)
def test_a_packet_put_together_from_its_pieces_is_the_packet(nbytes: int) -> None:
    packet = bytes(i & 0xFF for i in range(min(nbytes, 256))) * (nbytes // 256 + 1)
    packet = packet[:nbytes]
    together = bytearray()
    for index, piece in enumerate(pieces(packet)):
        head, rest = unpack_chunk(payload_of(head_of(nbytes, index), piece))
        assert (head.index, head.count) == (index, count_pieces(nbytes))
        together += rest
    assert bytes(together) == packet


def test_every_piece_fits_a_relay_frame() -> None:
    head = msgspec.structs.replace(head_of(CHUNK_BYTES, 0), have=list(range(20_000)))
    start, piece = pack_chunk(head, bytes(CHUNK_BYTES))
    assert len(start) + len(piece) + 2 * 256 <= MAX_RELAY_BYTES


def test_pieces_are_views_and_count_bytes_whatever_the_items_are() -> None:
    numbers = array.array("f", range(CHUNK_BYTES // 4 + 1))
    cut = list(pieces(memoryview(numbers)))
    assert [len(piece) for piece in cut] == [CHUNK_BYTES, 4]
    assert all(piece.obj is numbers for piece in cut)
    assert [len(piece) for piece in pieces(memoryview(array.array("f")))] == [0]


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_a_wire_error(payload: bytes) -> None:
    with pytest.raises(WireError):
        unpack_chunk(memoryview(payload))


@given(st.integers(0, 2**16 - 1), st.binary(max_size=100))
def test_a_head_length_that_lies_is_refused(length: int, rest: bytes) -> None:
    with pytest.raises(WireError):
        unpack_chunk(memoryview(struct.pack("!H", length) + rest))


@given(st.integers(-3, 5), st.integers(-3, 5), st.integers(-9, 4 * CHUNK_BYTES), st.integers(0, 99))
def test_numbers_that_contradict_each_other_are_refused(
    index: int, count: int, total_bytes: int, piece_bytes: int
) -> None:
    head = ChunkHead("result", 1, 1, index, count, total_bytes, "fp32", [1], 1.0)
    payload = payload_of(head, bytes(piece_bytes))
    fits = (
        total_bytes >= 0
        and count == count_pieces(total_bytes)
        and 0 <= index < count
        and piece_bytes == min(CHUNK_BYTES, total_bytes - index * CHUNK_BYTES)
    )
    if fits:
        assert unpack_chunk(payload)[0] == head
    else:
        with pytest.raises(WireError, match="wrong size"):
            unpack_chunk(payload)


def test_a_piece_cut_short_is_refused_and_says_what_was_expected() -> None:
    payload = payload_of(head_of(1000, 0), bytes(1000))
    with pytest.raises(WireError, match=r"999 bytes as piece 0 of 1.*1000 bytes"):
        unpack_chunk(payload[:-1])


def test_resume_carries_no_piece_and_any_indices() -> None:
    head = msgspec.structs.replace(head_of(9 * CHUNK_BYTES, 5, kind="resume"), have=[0, 7])
    again, rest = unpack_chunk(payload_of(head))
    assert again.have == [0, 7]
    assert len(rest) == 0


def test_a_head_that_is_too_large_is_refused_by_the_sender() -> None:
    head = msgspec.structs.replace(head_of(0, 0), sizes=list(range(70_000)))
    with pytest.raises(FrameTooLarge, match="head of a tensor chunk"):
        pack_chunk(head)


def test_a_list_of_very_many_pieces_is_cut_to_fit() -> None:
    """As for a contribution of 16 GiB after a reconnect: the rest is sent again."""
    have = list(range(65_536))
    head = msgspec.structs.replace(head_of(0, 0, kind="resume"), have=have)
    again, _ = unpack_chunk(payload_of(head))
    assert 10_000 < len(again.have) < len(have)
    assert again.have == have[: len(again.have)]
    whole = b"".join(pack_frame(ServerFrameHead("have", 1, have=have)))
    listed, _ = unpack_frame(memoryview(whole))
    assert 10_000 < len(listed.have) < len(have)
