"""What is special to messages through the hub: pieces that are lost, repeated or damaged."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest

from atoll.errors import DeadlineExceeded, HubError, PeerLost, PeerRefused, WireError
from atoll.group.peers.channel import LocalNetwork
from atoll.group.peers.relayed import RelayedChannel
from atoll.net.sync_link import SyncLink
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.peer_pieces import PeerPiece, PieceKind, pack_piece, unpack_piece
from tests.group.peers.channel_suite import LARGE, MUCH, received, sent
from tests.net.small_hub import SmallHub, linked
from tests.patience import PATIENCE_S


@contextlib.contextmanager
def channels(hub: SmallHub, **most: int) -> Iterator[tuple[RelayedChannel, ...]]:
    """Open the channels of members, with the bytes that each may hold."""
    with linked(hub, *(f"job/{name}" for name in most)) as links, contextlib.ExitStack() as stack:
        found = []
        for link, most_bytes in zip(links, most.values(), strict=True):
            channel = RelayedChannel(link, job="job", most_bytes=most_bytes)
            stack.callback(channel.close)
            found.append(channel)
        yield tuple(found)


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_a_message_survives_a_lost_connection() -> None:
    with SmallHub() as hub, channels(hub, w0=MUCH, w1=MUCH) as (first, second):
        sent(first.send("w1", b"before", timeout_s=PATIENCE_S))
        hub.shut()
        done = first.send("w1", b"during", [LARGE], timeout_s=PATIENCE_S)
        hub.open()
        # If the receiver comes back later than the sender, the hub does not know it: send again.
        while isinstance(done.exception(PATIENCE_S), PeerLost):
            done = first.send("w1", b"during", [LARGE], timeout_s=PATIENCE_S)
        sent(done)
        assert received(second).head == b"before"
        assert received(second).data == LARGE


def test_a_member_that_takes_nothing_is_an_error_in_time() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (link, _):
        channel = RelayedChannel(link, job="job")  # w1 has no channel that would answer
        with pytest.raises(DeadlineExceeded, match="w1 did not take"):
            sent(channel.send("w1", b"hello", timeout_s=0.3))
        channel.close()


def test_a_full_sender_waits_until_it_is_closed() -> None:
    size = len(LARGE)
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (link, _):
        channel = RelayedChannel(link, job="job", most_bytes=size)
        waits = channel.send("w1", b"4", [LARGE], timeout_s=PATIENCE_S)
        with pytest.raises(DeadlineExceeded):
            sent(channel.send("w1", b"5", [LARGE], timeout_s=0.1))
        channel.close()
        for done in (waits, channel.send("w1", b"6", timeout_s=PATIENCE_S)):
            with pytest.raises(HubError, match="closed"):
                sent(done)
        with pytest.raises(HubError, match="closed"):
            channel.receive(timeout_s=PATIENCE_S)


def _tell(link: SyncLink, to: str, *pieces: tuple[PeerPiece, bytes]) -> None:
    for piece, body in pieces:
        link.relay(to, pack_piece(piece, body), deadline=soon())


def test_repeated_and_contradicting_pieces_change_nothing() -> None:
    part = PieceKind.PART
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (sender, receiver):
        channel = RelayedChannel(receiver, job="job")
        inbox = sender.subscribe()
        size = CHUNK_BYTES + 1
        first = (PeerPiece(part, 5, 0, 1, size), b"a" * CHUNK_BYTES)
        last = (PeerPiece(part, 5, 1, 1, size), b"b")
        _tell(sender, "job/w1", last)
        lost = inbox.receive(deadline=soon())
        assert unpack_piece(lost.payload)[0] == PeerPiece(PieceKind.MISSING, 5, missing=[0])  # type: ignore[union-attr]
        _tell(sender, "job/w1", (PeerPiece(part, 5, 1, 0, size), b"c"), first, first, last, last)
        assert received(channel).data == b"a" * (CHUNK_BYTES - 1) + b"b"
        for _ in range(2):  # answered again, but not delivered again
            arrival = inbox.receive(deadline=soon())
            assert unpack_piece(arrival.payload)[0] == PeerPiece(PieceKind.TAKEN, 5)  # type: ignore[union-attr]
        assert channel.receive(timeout_s=0.0) is None
        channel.close()


@pytest.mark.parametrize(
    "piece",
    [
        PeerPiece(PieceKind.PART, 1, 0, 0, 5), PeerPiece(PieceKind.PART, 1, 1, 0, 4),
        PeerPiece(PieceKind.PART, 1, -1, 0, 4), PeerPiece(PieceKind.PART, 1, 0, 5, 4),
        PeerPiece(PieceKind.PART, 1, 0, 0, 1 << 40),
    ],
)  # fmt: skip
def test_damaged_pieces_are_refused(piece: PeerPiece) -> None:
    head, _ = pack_piece(piece)
    with pytest.raises(WireError):
        unpack_piece(memoryview(head + b"four"))
    with pytest.raises(WireError):
        unpack_piece(memoryview(head[:8]))


def test_a_removed_member_is_lost_to_all_others() -> None:
    network = LocalNetwork()
    first, second = network.channel("w0"), network.channel("w1", most_bytes=100)
    sent(first.send("w1", b"", [bytes(100)], timeout_s=1))
    with pytest.raises(PeerRefused, match="no room"):
        sent(first.send("w1", b"", [b"1"], timeout_s=1))
    network.remove("w1")
    with pytest.raises(PeerLost):
        sent(first.send("w1", b"", timeout_s=1))
    with pytest.raises(PeerLost):
        sent(second.send("w0", b"", timeout_s=1))
    assert len(received(second).data) == 100
    with pytest.raises(PeerLost):
        second.receive(timeout_s=1)
