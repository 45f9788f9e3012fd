from __future__ import annotations

import array
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameTooLarge, VersionMismatch, WireError
from atoll.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Kind,
    decode,
    decode_relay,
    encode,
    encode_relay,
    verify,
)
from atoll.wire.limits import MAX_CONTROL_BYTES, MAX_FRAME_BYTES, MAX_RELAY_BYTES, PROTOCOL

addresses = st.text(max_size=60)
payloads = st.lists(st.binary(max_size=300), max_size=4)


@given(st.sampled_from(Kind), payloads)
def test_a_frame_comes_back_as_it_was_sent(kind: Kind, parts: list[bytes]) -> None:
    frame = decode(encode(kind, *parts))
    verify(frame)
    assert (frame.kind, bytes(frame.body)) == (kind, b"".join(parts))


@given(addresses, addresses, payloads)
def test_a_relay_frame_comes_back_as_it_was_sent(to: str, source: str, parts: list[bytes]) -> None:
    frame = decode(encode_relay(to, source, *parts))
    verify(frame)
    relay = decode_relay(frame)
    assert (relay.to, relay.source, bytes(relay.payload)) == (to, source, b"".join(parts))


@given(st.binary(max_size=400))
def test_garbage_is_refused_with_a_wire_error(message: bytes) -> None:
    with pytest.raises(WireError):
        decode(message)


@given(st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.binary())
def test_an_honest_magic_does_not_excuse_the_rest(
    kind: int, length: int, checksum: int, body: bytes
) -> None:
    message = HEADER.pack(MAGIC, PROTOCOL, kind, length, checksum) + body
    try:
        frame = decode(message)
    except WireError:
        return
    assert len(frame.body) == length
    assert frame.kind is Kind.RELAY or zlib.crc32(body) == checksum


@given(st.sampled_from(Kind), st.binary(min_size=1, max_size=200), st.data())
def test_a_frame_cut_short_is_refused(kind: Kind, body: bytes, data: st.DataObject) -> None:
    message = encode(kind, body)
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(WireError):
        decode(message[:cut])


@given(st.sampled_from(Kind), st.binary(max_size=200), st.binary(min_size=1, max_size=9))
def test_bytes_behind_a_frame_are_refused(kind: Kind, body: bytes, more: bytes) -> None:
    with pytest.raises(WireError, match="length of a frame is wrong"):
        decode(encode(kind, body) + more)


@given(st.sampled_from(Kind), st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_of_the_body_is_noticed(
    kind: Kind, body: bytes, data: st.DataObject
) -> None:
    message = bytearray(encode(kind, body))
    position = data.draw(st.integers(HEADER_BYTES, len(message) - 1))
    message[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(WireError, match="checksum"):
        verify(decode(bytes(message)))


def test_another_version_is_named_on_both_sides() -> None:
    message = HEADER.pack(MAGIC, PROTOCOL + 1, Kind.CONTROL, 0, 0)
    with pytest.raises(VersionMismatch, match=f"version {PROTOCOL + 1}.*version {PROTOCOL}"):
        decode(message)


@pytest.mark.parametrize(
    ("kind", "limit"), [(Kind.CONTROL, MAX_CONTROL_BYTES), (Kind.RELAY, MAX_RELAY_BYTES)]
)
def test_the_limit_of_a_kind_holds_on_both_sides(kind: Kind, limit: int) -> None:
    largest = encode(kind, bytes(limit))
    assert len(largest) <= MAX_FRAME_BYTES
    assert len(decode(largest).body) == limit
    with pytest.raises(FrameTooLarge, match=str(limit + 1)):
        encode(kind, bytes(limit + 1))
    with pytest.raises(FrameTooLarge, match=str(limit + 1)):
        decode(HEADER.pack(MAGIC, PROTOCOL, kind, limit + 1, 0) + bytes(limit + 1))


@given(st.binary(max_size=60))
def test_garbage_addresses_are_refused_or_stay_inside_the_body(body: bytes) -> None:
    frame = decode(encode(Kind.RELAY, body))
    try:
        relay = decode_relay(frame)
    except WireError:
        return
    assert len(relay.to.encode()) + len(relay.source.encode()) + len(relay.payload) + 2 == len(body)


def test_an_address_that_is_too_long_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="address is too long"):
        encode_relay("x" * 256, "job/w0")
    assert decode_relay(decode(encode_relay("x" * 255, "job/w0"))).to == "x" * 255


def test_views_of_larger_items_are_measured_in_bytes() -> None:
    numbers = array.array("f", [1.0, 2.0, 3.0])
    assert bytes(decode(encode(Kind.RELAY, memoryview(numbers))).body) == numbers.tobytes()


def test_the_body_is_a_view_and_raw_the_message_itself() -> None:
    message = encode(Kind.RELAY, b"abc")
    frame = decode(message)
    assert frame.raw is message
    assert frame.body.obj is message
