"""Messages about the committed state: nothing of a stranger is believed unchecked."""

from __future__ import annotations

import contextlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameTooLarge, WireError
from atoll.wire.chunks import ChunkHead, pack_chunk, unpack_chunk
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.recovery_messages import (
    ANSWERS,
    ASKS,
    ImageOffer,
    StateAnswer,
    StateAsk,
    StateManifest,
    ask_of,
    decode_answer,
    decode_state_manifest,
    encode_answer,
    encode_state_manifest,
    pack_answer,
    pack_ask,
    path_of,
    state_manifest,
    unpack_answer,
    unpack_ask,
)


def manifest_of(data: bytes) -> StateManifest:
    return state_manifest(memoryview(data), job="j", round_=3, base="b", name="shared")


def test_a_manifest_knows_every_chunk() -> None:
    data = os.urandom(CHUNK_BYTES * 2 + 5)
    manifest = manifest_of(data)
    assert manifest.count == 3
    assert [manifest.size_of(i) for i in range(3)] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert all(manifest.fits(i, data[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]) for i in range(3))
    assert not manifest.fits(2, data[:5])
    assert not manifest.fits(3, b"")
    assert decode_state_manifest(encode_state_manifest(manifest)) == manifest


@pytest.mark.parametrize(
    "change",
    [{"job": "k"}, {"round": 4}, {"base": "c"}, {"name": "inner"}, {"digests": b"x" * 16}],
    ids=str,
)
def test_the_root_tells_any_two_manifests_apart(change: dict[str, object]) -> None:
    manifest = manifest_of(b"hello")
    assert msgspec.structs.replace(manifest, **change).root != manifest.root
    assert manifest_of(b"hello").root == manifest.root


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": -1},
        {"nbytes": 0},
        {"nbytes": CHUNK_BYTES + 1},
        {"nbytes": 2**60},
        {"chunk_bytes": 1},
        {"chunk_bytes": 2 * CHUNK_BYTES},
        {"digests": b""},
        {"digests": bytes(17)},
    ],
    ids=str,
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    data = encode_state_manifest(msgspec.structs.replace(manifest_of(b"hello"), **change))
    with pytest.raises(WireError, match="contradicts itself"):
        decode_state_manifest(data)


@given(st.binary(max_size=200))
def test_bytes_of_a_stranger_raise_nothing_but_wire_errors(data: bytes) -> None:
    for read in (decode_state_manifest, decode_answer):
        with contextlib.suppress(WireError):
            read(data)
    for prefix in (b"", ASKS, ANSWERS):
        for unpack in (unpack_ask, unpack_answer):
            with contextlib.suppress(WireError):
                unpack(memoryview(prefix + data))
    with contextlib.suppress(WireError):
        ask_of(data.decode("latin-1"))


def test_asks_and_answers_come_back_from_relay_frames() -> None:
    ask = StateAsk(7, "chunk", 3, "inner", 5, 8)
    assert unpack_ask(memoryview(b"".join(pack_ask(ask)))) == ask
    offer = ImageOffer("shared", 100, "r", 20)
    answer = StateAnswer(7, "ok", 3, base="b", key="k", images=[offer])
    found, body = unpack_answer(memoryview(b"".join(pack_answer(answer, b"body"))))
    assert found == answer == decode_answer(encode_answer(answer))
    assert bytes(body) == b"body"


@pytest.mark.parametrize("ask", [StateAsk(0, "offer", 3), StateAsk(0, "chunk", 3, "inner", 5, 8)])
def test_asks_come_back_from_paths(ask: StateAsk) -> None:
    assert ask_of(path_of(ask)) == ask


@pytest.mark.parametrize(
    "path", ["", "/", "x/offer/1/-/0/1", "/offer/one/-/0/1", f"/offer/{'9' * 5000}/-/0/1"]
)
def test_a_path_that_asks_for_nothing_is_refused(path: str) -> None:
    with pytest.raises(WireError, match="ask for the state is malformed"):
        ask_of(path)


def test_a_message_cut_short_is_refused() -> None:
    whole = pack_ask(StateAsk(1, "offer", 3))[0]
    for length in range(len(whole)):
        with pytest.raises(WireError):
            unpack_ask(memoryview(whole[:length]))


def test_an_answer_too_long_for_its_length_is_refused() -> None:
    with pytest.raises(FrameTooLarge):
        pack_answer(StateAnswer(1, "refused", 0, reason="x" * 70_000))


def test_reduce_pieces_and_state_messages_are_distinct() -> None:
    head = ChunkHead("contribute", 1, 1, 0, 1, 4, "none", [1], 1.0)
    piece = memoryview(b"".join(pack_chunk(head, b"abcd")))
    for unpack in (unpack_ask, unpack_answer):
        with pytest.raises(WireError, match="not a message about the state"):
            unpack(piece)
    for parts in (pack_ask(StateAsk(1, "offer", 3)), pack_answer(StateAnswer(1, "ok", 3))):
        with pytest.raises(WireError, match="malformed"):
            unpack_chunk(memoryview(b"".join(parts)))
