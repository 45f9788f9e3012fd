"""The direct route, encrypted: who is on the network reads and changes nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch

from atoll.codec.registry import make_codec
from atoll.errors import AuthError, GroupError, PeerLost, PeerRefused
from atoll.group.collectives import adding
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup
from atoll.group.collectives.collectives import weighted_mean
from atoll.group.routes import line_group, line_listener
from atoll.group.routes.line_group import LineGroup
from atoll.group.routes.line_listener import GroupListener, LineMeeting, MetLine
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import split_host_port
from atoll.net import member_tls
from atoll.net.member_tls import MemberKey
from tests.group.man_in_the_middle import Middle
from tests.group.meeting_place import Place, places
from tests.patience import PATIENCE_S

SIZE = 100_000
MARK = 1.2345678
"""A value whose bytes are looked for on the network."""


@pytest.fixture
def place() -> Iterator[Place]:
    with places() as place:
        yield place(2)


@pytest.fixture
def middle(place: Place) -> Iterator[Middle]:
    """Stand between two members: the first one's listener is reached through it."""
    listener = place.routes[0]._listener
    assert listener is not None
    between = Middle(listener.dial)
    listener.dial = between.dial
    yield between
    between.close()


def mean(wires: BoundedProcessGroup) -> torch.Tensor:
    values = torch.full((SIZE,), MARK * (1 + wires.rank))
    return weighted_mean(wires, values, codec=make_codec("fp32"), weight=1.0, key="x").vector


def received_floats(middle: Middle) -> bool:
    """Return whether the one in the middle can read a value that was sent."""
    marks = [torch.full((4,), MARK * times).numpy().tobytes() for times in (1, 2, 3)]
    assert len(middle.received) > 4 * SIZE
    return any(mark in middle.received for mark in marks)


def test_one_in_the_middle_sees_no_float(place: Place, middle: Middle) -> None:
    found = place.together(mean)
    assert torch.equal(found[0], found[1])
    assert found[0][0].item() == pytest.approx(MARK * 1.5)
    assert not received_floats(middle)


def test_what_is_sent_plainly_is_found_by_the_same_looking() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        middle = Middle(f"127.0.0.1:{server.getsockname()[1]}")
        try:
            with socket.create_connection(split_host_port(middle.dial)) as sender:
                near, _ = server.accept()
                sender.sendall(torch.full((2 * SIZE,), MARK).numpy().tobytes())
                sender.shutdown(socket.SHUT_WR)
                with near:
                    while near.recv(65_536):
                        pass
            assert received_floats(middle)
        finally:
            middle.close()


@pytest.mark.parametrize("how", ["change", "insert"])
def test_what_one_in_the_middle_changes_is_no_result(
    place: Place, middle: Middle, how: str
) -> None:
    at = 3000 + SIZE  # after the handshake, in the midst of the values
    setattr(middle, f"{how}_at", at)
    for found in place.run(mean, timeout_s=PATIENCE_S):
        assert isinstance(found, PeerLost)
    setattr(middle, f"{how}_at", -1)
    for found in place.together(mean):  # the next round connects anew
        assert found[0].item() == pytest.approx(MARK * 1.5)


def test_a_stranger_does_not_take_a_members_place(place: Place) -> None:
    """It knows names and addresses, listens where a member would, and dials."""
    listener = place.routes[0]._listener
    assert listener is not None
    with socket.create_connection(split_host_port(listener.dial), PATIENCE_S) as line:
        line.settimeout(PATIENCE_S)
        stranger = MemberLines(b"of another job", me="w1")
        with pytest.raises(AuthError):
            stranger.dialling(line)
    assert not listener._waiting
    assert place.together(mean)[0][0].item() == pytest.approx(MARK * 1.5)


def test_a_member_cannot_pose_as_another_one() -> None:
    """It knows the job's key, but not the key pair whose fingerprint the hub has handed out."""
    with places() as make:
        place = make(2)
        keys = [MemberKey(), MemberKey()]
        for route, key in zip(place.routes, keys, strict=True):
            route.trust(MemberLines(b"key of the job", me=route._me, own=key))
            route.identities = lambda: {"w0": keys[0].fingerprint, "w1": keys[1].fingerprint}
        assert place.together(mean)[0][0].item() == pytest.approx(MARK * 1.5)
        place.routes[1].trust(MemberLines(b"key of the job", me="w1"))  # another key pair
        place.routes[1].drop()
        for found in place.run(mean, timeout_s=2.0):
            assert isinstance(found, GroupError), found


def test_flood_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_listener, "MOST_STRANGERS", 4)
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", 1.0)  # of those who say nothing
    listener = GroupListener("127.0.0.1")
    mine = MemberLines(b"key of the job", me="w0")
    assert mine.tls is not None
    listener.trust(mine.tls)
    before = threading.active_count()
    silent = [socket.create_connection(split_host_port(listener.dial)) for _ in range(20)]
    for line in silent:
        line.settimeout(PATIENCE_S)
    for line in silent[4:]:
        assert line.recv(1) == b"", "closed at once"
    assert threading.active_count() <= before + 4
    for line in silent[:4]:
        assert line.recv(1) == b"", "closed after the time of a handshake"
        line.close()
    for line in silent:
        line.close()
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", PATIENCE_S)
    with socket.create_connection(split_host_port(listener.dial), PATIENCE_S) as line:
        other = MemberLines(b"key of the job", me="w1")
        assert other.dialling(line, to="w0")
    listener.close()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_collectives_are_those_of_a_process_group(n: int) -> None:
    def work(wires: BoundedProcessGroup) -> tuple[list[float], list[int], list[int], list[int]]:
        assert isinstance(wires.group, LineGroup)
        rank = wires.rank
        summed = torch.arange(10.0) + rank
        wires.run(lambda: wires.group.allreduce([summed]))
        sent = torch.full((7,), rank, dtype=torch.uint8)
        wires.run(lambda: wires.group.broadcast(sent, n - 1))
        rows = torch.empty(2 * n, dtype=torch.uint8)
        own = torch.full((2,), rank, dtype=torch.uint8)
        wires.run(lambda: wires.group._allgather_base(rows, own))
        given = torch.full((n * rank,), rank, dtype=torch.uint8)  # `rank` bytes for everybody
        got = torch.empty(sum(range(n)), dtype=torch.uint8)
        wires.run(lambda: wires.group.alltoall_base(got, given, list(range(n)), [rank] * n))
        return summed.tolist(), sent.tolist(), rows.tolist(), got.tolist()

    with places() as make:
        for summed, sent, rows, got in make(n).together(work):
            assert summed == (n * torch.arange(10.0) + sum(range(n))).tolist()
            assert sent == [n - 1] * 7
            assert rows == [rank for rank in range(n) for _ in range(2)]
            assert got == [rank for rank in range(n) for _ in range(rank)]


@pytest.mark.parametrize("encrypted", [True, False])
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.every(5)
def test_a_ring_in_segments_has_the_same_bits(
    n: int, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(wires: BoundedProcessGroup) -> torch.Tensor:
        generator = torch.Generator().manual_seed(wires.rank)
        vector = torch.randn(1_003, generator=generator)
        adding.ring(wires, vector)
        return vector

    found = []
    for segment in (1_000_000, 17):
        monkeypatch.setattr(adding, "RING_SEGMENT", segment)
        with places() as make:
            place = make(n)
            for route in place.routes:
                key = b"key of the job"
                route.trust(MemberLines(key, me=route._me, encrypted=encrypted))
            found += place.together(work)
    mine = [torch.randn(1_003, generator=torch.Generator().manual_seed(i)) for i in range(n)]
    torch.testing.assert_close(found[0], sum(mine))
    assert all(torch.equal(each, found[0]) for each in found)


def test_another_size_than_expected_is_refused_by_name(place: Place) -> None:
    def work(wires: BoundedProcessGroup) -> None:
        other = 1 - wires.rank
        size = 5 if wires.rank else 6
        sent = wires.group.send([torch.zeros(5)], other)
        wires.group.recv([torch.zeros(size)], other).wait(timedelta(seconds=PATIENCE_S))
        sent.wait(timedelta(seconds=PATIENCE_S))

    first, second = place.run(work)
    assert isinstance(first, PeerRefused)
    assert "from w1" in str(first)
    assert not isinstance(second, PeerRefused)


def test_worn_lines_are_made_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.together(mean)
    before = [route._group for route in place.routes]
    place.together(mean)
    assert before == [route._group for route in place.routes]
    monkeypatch.setattr(line_group, "RENEW_BYTES", 1000)
    assert place.together(mean)[0][0].item() == pytest.approx(MARK * 1.5)
    assert all(group is not route._group for group, route in zip(before, place.routes, strict=True))


@pytest.mark.parametrize(
    ("trip_s", "count"), [(0.0, 1), (0.02, 1), (0.1, 3), (0.15, 5), (10.0, line_group.MOST_LINES)]
)
def test_long_ways_have_as_many_lines_as_fill_them(trip_s: float, count: int) -> None:
    assert line_group.lines_for(trip_s) == count


def test_several_lines_carry_the_parts_of_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_group, "lines_for", lambda _: 3)
    monkeypatch.setattr(line_group, "STRIPED_BYTES", 1000)
    with places() as make:
        place = make(3)
        for sums in (place.together(mean), place.together(mean)):
            assert all(torch.equal(each, sums[0]) for each in sums)
            assert sums[0][0].item() == pytest.approx(MARK * 2)
        for route in place.routes:
            assert route._group is not None
            assert len(route._group._sockets) == 6
        place.routes[1].drop()  # e.g. an aborted attempt: its lines are made anew, all of them
        assert place.together(mean)[0][0].item() == pytest.approx(MARK * 2)


def test_lines_come_in_any_order_and_of_the_last_attempt_only() -> None:
    listener, members = GroupListener("127.0.0.1"), ("w0", "w1")
    mine, other = (MemberLines(b"key of the job", me=name) for name in members)
    assert mine.tls is not None
    assert other.tls is not None
    listener.trust(mine.tls)
    deadline = time.monotonic() + PATIENCE_S
    meeting = LineMeeting("m", members, "w0", deadline)

    def dial(number: int, attempt: int) -> MetLine:
        line = socket.create_connection(split_host_port(listener.dial), PATIENCE_S)
        assert other.tls is not None
        return MetLine.dialled(
            line, other.tls, meeting, to="w0", part=(number, 2), attempt=attempt
        )  # fmt: skip

    made = [dial(1, 7), dial(1, 8), dial(0, 7), dial(0, 8)]  # the third is of an ended attempt
    taken = listener.take(meeting, "w1")
    assert [(line.part, line.attempt) for line in taken] == [((0, 2), 8), ((1, 2), 8)]
    for ended in (made[0], made[2]):
        ended.plain.settimeout(PATIENCE_S)
        with suppress(ConnectionResetError):
            while ended.plain.recv(1 << 16):
                pass
    line_listener.cut_all([*made, *taken])
    listener.close()


def test_parts_are_the_same_on_both_sides() -> None:
    data = memoryview(bytes(range(256)) * 4000)
    parts = line_group._striped(data, 3)
    assert len(parts) == 3
    assert b"".join(parts) == data
    assert line_group._striped(data[:100], 3) == [data[:100]]
