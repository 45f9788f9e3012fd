"""Members talk directly where they can, and through the hub where they cannot."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from atoll.errors import AuthError, DeadlineExceeded, HubError
from atoll.group.peers import nearest
from atoll.group.peers.channel import LocalNetwork, PeerChannel
from atoll.group.peers.nearest import NearestChannel
from atoll.group.peers.relayed import RelayedChannel
from atoll.group.routes.member_lines import KnownMembers, MemberLines
from atoll.group.routes.rendezvous_store import split_host_port
from atoll.net.member_tls import MemberKey
from bench.kit.ports import free_port
from tests.group.peers.channel_suite import LARGE, MUCH, ChannelSuite, received, sent
from tests.net.small_hub import SmallHub, linked
from tests.node.running import until
from tests.patience import PATIENCE_S

KEY = b"key of this job"
HERE = "127.0.0.1"


@contextlib.contextmanager
def nearest_pair(
    hub: SmallHub, w0: int = MUCH, w1: int = MUCH, *, second: str = HERE, key: bytes = KEY
) -> Iterator[tuple[NearestChannel, NearestChannel]]:
    """Open two channels; the second listens at this address, if any, with this key."""
    with linked(hub, "job/w0", "job/w1") as (one, other):
        lines = {me: MemberLines(of, me=me) for me, of in (("w0", KEY), ("w1", key))}
        first = NearestChannel(
            one, job="job", me="w0", lines=lines["w0"], address=HERE, most_bytes=w0
        )
        last = NearestChannel(
            other, job="job", me="w1", lines=lines["w1"], address=second, most_bytes=w1
        )
        try:
            yield first, last
        finally:
            first.close()
            last.close()


def talk(first: NearestChannel, second: NearestChannel) -> Callable[[], bool]:
    """Return a condition: a message has gone directly. Each check sends another one."""

    def direct() -> bool:
        before = first.sent.direct
        sent(first.send("w1", b"hello", timeout_s=PATIENCE_S))
        assert received(second).head == b"hello"
        return first.sent.direct > before

    return direct


class TestRelayed(ChannelSuite):
    @contextlib.contextmanager
    def channels(self, w0: int = MUCH, w1: int = MUCH) -> Iterator[tuple[PeerChannel, PeerChannel]]:
        with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as links:
            first, second = (
                RelayedChannel(link, job="job", most_bytes=most)
                for link, most in zip(links, (w0, w1), strict=True)
            )
            yield first, second
            first.close()
            second.close()


class TestLocal(ChannelSuite):
    @contextlib.contextmanager
    def channels(self, w0: int = MUCH, w1: int = MUCH) -> Iterator[tuple[PeerChannel, PeerChannel]]:
        network = LocalNetwork()
        yield network.channel("w0", most_bytes=w0), network.channel("w1", most_bytes=w1)


class TestDirect(ChannelSuite):
    @contextlib.contextmanager
    def channels(self, w0: int = MUCH, w1: int = MUCH) -> Iterator[tuple[PeerChannel, PeerChannel]]:
        with SmallHub() as hub, nearest_pair(hub, w0, w1) as (first, second):
            first.reach({"w1": second.dial, "w7": [f"{HERE}:{free_port()}"]})
            until(talk(first, second))
            yield first, second


class TestCapped(ChannelSuite):
    @contextlib.contextmanager
    def channels(self, w0: int = MUCH, w1: int = MUCH) -> Iterator[tuple[PeerChannel, PeerChannel]]:
        with SmallHub() as hub, nearest_pair(hub, w0, w1, second="") as (first, second):
            assert second.dial == []
            second.reach({"w0": first.dial})
            yield first, second
            assert first.sent.direct == second.sent.direct == 0


def test_a_broken_connection_is_relayed_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nearest, "AGAIN_S", 0.0)
    with SmallHub() as hub, nearest_pair(hub) as (first, second):
        first.reach({"w1": second.dial})
        until(talk(first, second))
        assert second._listener is not None
        for line in list(second._listener._lines):  # as a router that forgets it
            line.shutdown(socket.SHUT_RDWR)
        sent(first.send("w1", b"after", [LARGE], timeout_s=PATIENCE_S))
        mail = received(second)
        assert (mail.head, bytes(mail.data)) == (b"after", LARGE)
        until(talk(first, second))


def test_what_nobody_answers_at_is_relayed() -> None:
    with SmallHub() as hub, nearest_pair(hub) as (first, second):
        first.reach({"w1": [f"{HERE}:{free_port()}"]})
        for _ in range(3):
            assert not talk(first, second)()


def test_a_moved_member_is_reached_at_its_new_address() -> None:
    with SmallHub() as hub, nearest_pair(hub) as (first, second):
        first.reach({"w1": [f"{HERE}:{free_port()}"]})
        assert not talk(first, second)()
        first.reach({"w1": second.dial})
        until(talk(first, second))


def test_a_member_with_another_key_is_not_talked_to() -> None:
    with SmallHub() as hub, nearest_pair(hub, key=b"of another job") as (first, second):
        first.reach({"w1": second.dial})
        for _ in range(3):
            assert not talk(first, second)()
        with socket.create_connection(split_host_port(second.dial[0]), PATIENCE_S) as line:
            stranger = MemberLines(KEY, me="w0")
            with pytest.raises(AuthError, match="does not know the secret"):
                stranger.dialling(line)
        assert second.receive(timeout_s=0.0) is None


def test_a_member_cannot_pose_as_another_one() -> None:
    """All know the job's key, so any could sign itself the name of another member."""
    keys = {me: MemberKey() for me in ("w0", "w1")}
    fingerprints = {me: key.fingerprint for me, key in keys.items()}

    def lines(me: str, own: MemberKey) -> MemberLines:
        return MemberLines(KEY, me=me, own=own, known=KnownMembers(lambda: dict(fingerprints)))

    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (one, other):
        first, last = (
            NearestChannel(
                link, job="job", me=me, lines=lines(me, keys[me]), address=HERE, most_bytes=MUCH
            )
            for link, me in ((one, "w0"), (other, "w1"))
        )
        with contextlib.closing(first), contextlib.closing(last):
            first.reach({"w1": last.dial})
            until(talk(first, last))
            posing = lines("w0", MemberKey())
            with socket.create_connection(split_host_port(last.dial[0]), PATIENCE_S) as line:
                poser = posing.dialling(line, to="w1")
                poser.send(b"job/w0")
                with pytest.raises(OSError):
                    poser.receive(most=0)
            with socket.create_connection(split_host_port(last.dial[0]), PATIENCE_S) as line:
                # w1 has moved; its old process still answers.
                fingerprints["w1"] = MemberKey().fingerprint
                with pytest.raises(AuthError, match="that of w1, as the hub knows it"):
                    lines("w0", keys["w0"]).dialling(line, to="w1")
            fingerprints["w0"] = posing.tls.fingerprint if posing.tls is not None else ""
            with socket.create_connection(split_host_port(last.dial[0]), PATIENCE_S) as line:
                restarted = posing.dialling(line)
                restarted.send(b"job/w0")  # the hub is asked again, and knows it now
                assert restarted.receive(most=0) == b""


def test_a_hub_that_does_not_answer_knows_nobody() -> None:
    def ask() -> dict[str, str]:
        raise HubError("the hub does not answer")

    assert not KnownMembers(ask).has("w0", "00")
    assert not KnownMembers(lambda: {"w0": ""}).has("w0", "")


def test_a_listener_that_hangs_does_not_hold_messages_for_ever() -> None:
    with SmallHub() as hub, nearest_pair(hub) as (first, second):
        with socket.create_server((HERE, 0)) as hung:
            first.reach({"w1": [f"{HERE}:{hung.getsockname()[1]}"]})
            sent(first.send("w1", b"hello", timeout_s=PATIENCE_S))  # no greeting: relayed
            assert received(second).head == b"hello"

        def answer_nothing() -> None:
            line, _ = silent.accept()
            member = MemberLines(KEY, me="w1").listening(line)
            member.receive(most=100)
            member.send(b"")
            lines.append(line)

        lines: list[socket.socket] = []
        with socket.create_server((HERE, 0)) as silent:
            first.reach({"w1": [f"{HERE}:{silent.getsockname()[1]}"]})
            assert not talk(first, second)()
            answer_nothing()
            until(lambda: first._lines["w1"].open)
            with pytest.raises(DeadlineExceeded, match="w1 did not take"):
                sent(first.send("w1", b"hello", timeout_s=0.1))
            assert not talk(first, second)()
            lines[0].close()


def test_relays_that_wait_end_when_the_channel_is_closed() -> None:
    gate = threading.Event()
    with SmallHub() as hub, nearest_pair(hub) as (first, second):
        first.reach({"w1": second.dial})
        until(talk(first, second))
        first._again.submit(gate.wait)  # as a relay that waits for room
        lock = second._relayed.queue._condition
        with lock:  # the message is taken, but not answered
            done = first.send("w1", b"hello", timeout_s=PATIENCE_S)
            first._lines["w1"].close()
            first.close()
            gate.set()
            with pytest.raises(HubError, match="closed"):
                done.result(PATIENCE_S)


def test_a_message_that_comes_both_ways_counts_once() -> None:
    with SmallHub() as hub, linked(hub, "job/w0", "job/w1") as (one, other):
        sender = RelayedChannel(one, job="job")
        receiver = NearestChannel(other, job="job", me="w1")
        for number, head in ((5, b"first"), (5, b"first"), (6, b"second")):
            sent(sender.send("w1", struct.pack("!Q", number) + head, timeout_s=PATIENCE_S))
        assert [received(receiver).head for _ in range(2)] == [b"first", b"second"]
        assert receiver.receive(timeout_s=0.0) is None
        sender.close()
        receiver.close()
