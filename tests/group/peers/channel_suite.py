"""What every channel between members does; each kind of channel inherits it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from atoll.errors import AtollError, PeerLost, PeerRefused
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.wire.limits import CHUNK_BYTES
from tests.patience import PATIENCE_S

LARGE = bytes(range(256)) * (CHUNK_BYTES // 100)
MUCH = 1 << 28


def received(channel: PeerChannel) -> PeerMail:
    mail = channel.receive(timeout_s=PATIENCE_S)
    assert mail is not None
    return mail


def sent(done: Future[None]) -> None:
    done.result(PATIENCE_S)


class ChannelSuite:
    """Subclasses open channels of members `w0` and `w1`, with the bytes that each may hold."""

    def channels(
        self, w0: int = MUCH, w1: int = MUCH
    ) -> contextlib.AbstractContextManager[tuple[PeerChannel, PeerChannel]]:
        raise NotImplementedError

    @pytest.fixture
    def pair(self) -> Iterator[tuple[PeerChannel, PeerChannel]]:
        with self.channels() as pair:
            yield pair

    def test_large_messages_cross_whole(self, pair: tuple[PeerChannel, PeerChannel]) -> None:
        first, second = pair
        under_way = [
            first.send("w1", b"head %d" % n, [LARGE, b"", b"x" * n], timeout_s=PATIENCE_S)
            for n in range(4)
        ]
        back = second.send("w0", b"alone", timeout_s=PATIENCE_S)
        for done in (*under_way, back):
            sent(done)
        found = sorted((received(second) for _ in range(4)), key=lambda mail: mail.head)
        assert [mail.head for mail in found] == [b"head %d" % n for n in range(4)]
        assert [bytes(mail.data) for mail in found] == [LARGE + b"x" * n for n in range(4)]
        assert {mail.source for mail in found} == {"w0"}
        assert received(first) == PeerMail("w1", b"alone", memoryview(b""))
        assert second.receive(timeout_s=0.0) is None

    def test_an_absent_member_is_an_error_at_once(
        self, pair: tuple[PeerChannel, PeerChannel]
    ) -> None:
        for data in (b"", LARGE):
            with pytest.raises(PeerLost, match=r"w7|not connected"):
                sent(pair[0].send("w7", b"hello", [data], timeout_s=10 * PATIENCE_S))

    def test_a_full_receiver_refuses(self) -> None:
        with self.channels(w1=2 * len(LARGE)) as (first, second):
            sent(first.send("w1", b"1", [LARGE], timeout_s=PATIENCE_S))
            with pytest.raises(PeerRefused, match="no room"):
                sent(first.send("w1", b"2", [LARGE, LARGE], timeout_s=PATIENCE_S))
            assert received(second).head == b"1"
            sent(first.send("w1", b"3", [LARGE, LARGE], timeout_s=PATIENCE_S))
            assert received(second).head == b"3"

    def test_a_closed_channel_is_an_error(self, pair: tuple[PeerChannel, PeerChannel]) -> None:
        first, _ = pair
        first.close()
        with pytest.raises(AtollError):
            sent(first.send("w1", b"late", timeout_s=PATIENCE_S))
        with pytest.raises(AtollError):
            first.receive(timeout_s=PATIENCE_S)
