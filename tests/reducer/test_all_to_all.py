from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.codec.base import Packet
from atoll.errors import GroupError, WireError
from atoll.reducer.all_to_all import (
    ALIGNMENT,
    AllToAllMessages,
    Outgoing,
    PeerMessage,
    open_bundle,
    open_direct,
    open_outgoing,
)
from atoll.wire.limits import CHUNK_BYTES

MEMBERS = ("w0", "w1", "w2", "w3")


def message(to: tuple[str, ...], data: bytes, codec: str = "fp32") -> PeerMessage:
    return PeerMessage(to, Packet(data, codec, (len(data) // 4,)))


def gift(member: str, *messages: PeerMessage, weight: float = 1.0) -> Outgoing:
    return Outgoing.of(member, messages, weight=weight, members=MEMBERS)


anything = st.lists(
    st.tuples(st.lists(st.sampled_from([*MEMBERS, "w9"]), max_size=5), st.binary(max_size=50)),
    max_size=5,
)


@given(st.dictionaries(st.sampled_from(MEMBERS), anything, min_size=1))
def test_everybody_gets_exactly_what_is_for_it(given_: dict[str, list[Any]]) -> None:
    """Through the packet up, the reducer, and the packet down."""
    messages = {m: [message(tuple(to), data) for to, data in given_[m]] for m in sorted(given_)}
    outgoing = [gift(m, *each, weight=float(m[1:])) for m, each in messages.items()]
    opened = [
        open_outgoing(g.member, bytes(g.packed()), weight=g.weight, members=MEMBERS)
        for g in outgoing
    ]
    assert [g.digest for g in opened] == [g.digest for g in outgoing]
    routed = AllToAllMessages.of(opened)
    for me in MEMBERS:
        data = b"".join(bytes(piece) for _, piece in routed.for_member(me).pieces())
        got = open_bundle(data, me=me, members=MEMBERS)
        assert got.digest == routed.digest
        assert got.weights == {m: float(m[1:]) for m in messages}
        expected = {
            m: [bytes(p.packet.data) for p in each if me in p.to and m != me]
            for m, each in messages.items()
        }
        expected = {m: each for m, each in expected.items() if each}
        assert {m: [bytes(p.data) for p in each] for m, each in got.packets.items()} == expected
        assert list(got.packets) == [m for m in MEMBERS if m in expected]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 30, CHUNK_BYTES, 3 * CHUNK_BYTES + 11])
def test_pieces_put_together_are_the_packet_whatever_is_skipped(size: int) -> None:
    data = random.Random(size).randbytes(size)
    bundle = AllToAllMessages.of(
        [gift("w0", message(("w1",), data), message(("w1",), b"abcd"))]
    ).for_member("w1")
    found = {index: bytes(piece) for index, piece in bundle.pieces()}
    assert list(found) == list(range(len(found)))
    assert {len(piece) for piece in list(found.values())[:-1]} <= {CHUNK_BYTES}
    assert sum(map(len, found.values())) == bundle.nbytes
    for index in found:
        assert index not in dict(bundle.pieces(skip={index}))
        assert bytes(dict(bundle.pieces(skip=set(found) - {index}))[index]) == found[index]
    packets = open_bundle(b"".join(found.values()), me="w1", members=MEMBERS).packets["w0"]
    assert [bytes(packet.data) for packet in packets] == [data, b"abcd"]


def test_messages_are_aligned_for_reading_in_place() -> None:
    packed = gift("w0", *(message(("w1",), bytes(n)) for n in range(5))).packed_for("w1")
    assert len(packed) % ALIGNMENT == 0
    start = len(packed) - 4 * ALIGNMENT
    for packet in open_direct("w0", packed):
        assert bytes(packed).index(bytes(packet.data)) <= start
    assert not gift("w0", message(("w1",), b"")).packed_for("w2")


def test_digest_depends_on_every_byte_receiver_and_member() -> None:
    def digest(member: str = "w0", to: tuple[str, ...] = ("w1",), data: bytes = b"1234") -> str:
        return AllToAllMessages.of([gift(member, message(to, data)), gift("w3")]).digest

    different = [digest(), digest("w2"), digest(to=("w2",)), digest(data=b"1235")]
    assert len(set(different)) == 4
    assert digest() == digest()


def test_a_weight_that_no_sum_can_hold_is_refused() -> None:
    with pytest.raises(GroupError, match="weight"):
        gift("w0", weight=float("nan"))


def test_a_message_for_somebody_outside_the_plan_is_refused() -> None:
    packed = Outgoing.of(
        "w0", [message(("w8",), b"1234")], weight=1.0, members=["w0", "w8"]
    ).packed()
    with pytest.raises(WireError, match="no recipient"):
        open_outgoing("w0", bytes(packed), weight=1.0, members=MEMBERS)


@given(st.data())
def test_bytes_of_a_stranger_are_refused_and_never_crash(data: st.DataObject) -> None:
    good = bytes(
        gift("w0", message(("w1", "w2"), b"12345678"), message(("w3",), b"x" * 33)).packed()
    )
    mutated = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(good)))
    for bad in (bytes(mutated), good[:end], good + b"\0" * 16):
        for open_ in (
            lambda bad=bad: open_outgoing("w0", bad, weight=1.0, members=MEMBERS),
            lambda bad=bad: open_bundle(bad, me="w1", members=MEMBERS),
            lambda bad=bad: open_direct("w0", bad),
        ):
            try:
                open_()
            except WireError:
                continue


def test_handout_that_names_strangers_is_refused() -> None:
    bundle = b"".join(
        bytes(p) for _, p in AllToAllMessages.of([gift("w0")]).for_member("w1").pieces()
    )
    assert open_bundle(bundle, me="w1", members=["w0", "w1"]).weights == {"w0": 1.0}
    with pytest.raises(WireError, match="outside the plan"):
        open_bundle(bundle, me="w1", members=["w1", "w2"])
    assert msgspec.msgpack.encode("w0") in bundle
