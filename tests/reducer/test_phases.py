"""Several exchanges of one epoch at the reducer: in order, bounded, and forgotten when done."""

from __future__ import annotations

import torch

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.reducer.all_to_all import Outgoing, PeerMessage, open_bundle
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, pieces
from atoll.wire.messages import MemberLost
from tests.patience import PATIENCE_S
from tests.reducer.test_bad_input import EPOCH, JOB, Bench, head_of, plan_of

MEMBERS = ["w0", "w1"]


def bench() -> Bench:
    return Bench(plan_of(members=MEMBERS))


def give(place: Bench, member: str, phase: int, *, data: bytes = b"12345678") -> None:
    other = MEMBERS[1 - MEMBERS.index(member)]
    packet = Packet(data, "fp32", (len(data) // 4,))
    gift = Outgoing.of(member, [PeerMessage((other,), packet)], weight=1.0, members=MEMBERS)
    upload = Packet(gift.packed(), ALL_TO_ALL, ())
    for index, piece in enumerate(pieces(upload.data)):
        place.send(member, head_of(upload, index=index, phase=phase), piece)


def settle(place: Bench) -> None:
    """Wait until everything that was begun is done."""
    place.reducer._summing.submit(lambda: None).result(PATIENCE_S)


def results(place: Bench, member: str, phase: int) -> list[tuple[ChunkHead, bytes]]:
    settle(place)
    said = place.endpoint.said.get(member, [])
    return [(h, p) for h, p in said if h.kind == "result" and h.phase == phase]


def test_reduce_all_to_all_reduce_in_one_epoch() -> None:
    place = bench()
    for phase in range(3):
        for member in MEMBERS:
            if phase == 1:
                give(place, member, phase)
            else:
                place.contribute(member, torch.full((5,), float(phase)), phase=phase)
        for member in MEMBERS:
            ((head, data),) = results(place, member, phase)
            assert head.contributors == MEMBERS
            if phase == 1:
                got = open_bundle(data, me=member, members=MEMBERS)
                assert [bytes(p.data) for (p,) in got.packets.values()] == [b"12345678"]
            else:
                packet = Packet(data, head.codec, tuple(head.sizes))
                expected = torch.full((5,), float(phase))
                assert torch.equal(make_codec("fp32").decode(packet), expected)
    place.close()


def test_early_exchange_is_refused_without_memory() -> None:
    place = bench()
    place.contribute("w0", torch.ones(100_000), phase=1)
    place.contribute("w0", torch.ones(100_000), phase=10**9)
    assert place.reducer.figures()["held_bytes"] == 0
    assert [head.kind for head, _ in place.endpoint.said["w0"]] == ["refused"]
    for member in MEMBERS:
        place.contribute(member, torch.ones(5))
    assert results(place, "w1", 0)
    place.close()


def test_an_exchange_is_forgotten_once_all_have_its_result() -> None:
    place = bench()
    for member in MEMBERS:
        give(place, member, 0, data=bytes(1000))
    settle(place)
    assert place.reducer.figures()["held_bytes"] >= 2000
    give(place, "w0", 1)
    assert place.reducer.figures()["held_bytes"] >= 2000  # w1 may still ask for its result
    give(place, "w1", 1)
    settle(place)
    assert place.reducer.figures()["held_bytes"] < 1000
    give(place, "w1", 0)  # late pieces of it are no news
    assert place.refused("w1") == []
    assert len(results(place, "w1", 0)) == 1
    place.close()


def test_a_member_lost_between_two_exchanges_is_not_waited_for() -> None:
    place = bench()
    for member in MEMBERS:
        give(place, member, 0)
    settle(place)
    place.reducer._handle(MemberLost(JOB, EPOCH, "w1"))
    give(place, "w0", 1)
    ((head, data),) = results(place, "w0", 1)
    assert head.contributors == ["w0"]
    assert open_bundle(data, me="w0", members=MEMBERS).packets == {}
    place.close()


def test_messages_that_misfit_their_table_are_refused_by_name() -> None:
    place = bench()
    upload = Packet(b"\0\0\0\xff garbage", ALL_TO_ALL, ())
    place.send("w0", head_of(upload), upload.data)
    give(place, "w1", 0)
    ((head, _),) = results(place, "w1", 0)
    assert head.contributors == ["w1"]
    assert "malformed" in place.refused("w0")[0] or "too long" in place.refused("w0")[0]
    assert [h.kind for h, _ in place.endpoint.said["w0"]] == ["refused"]
    place.close()


def test_member_can_request_its_missing_messages() -> None:
    place = bench()
    for member in MEMBERS:
        give(place, member, 0, data=bytes(600_000))
    pieces_ = results(place, "w1", 0)
    assert len(pieces_) == 3
    upload_head = pieces_[0][0]
    ask = head_of(Packet(b"", ALL_TO_ALL, ()), kind="resume", count=1, have=[0, 2])
    place.send("w1", ask)
    again = results(place, "w1", 0)[3:]
    assert [head.index for head, _ in again] == [1]
    assert again[0][1] == pieces_[1][1]
    assert upload_head.total_bytes > 600_000
    place.close()
