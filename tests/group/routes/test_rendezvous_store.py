from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import AuthError, DeadlineExceeded, GroupError, PeerLost
from atoll.group.base import Work
from atoll.group.routes.authenticated_line import AuthenticatedLine
from atoll.group.routes.member_lines import MemberLines
from atoll.group.routes.rendezvous_store import (
    MAX_NOTES,
    RendezvousStore,
    StoreServer,
    answers,
    split_host_port,
)
from atoll.net import member_tls
from tests.patience import PATIENCE_S, PROMPT_S


@pytest.fixture
def server() -> Iterator[StoreServer]:
    server = StoreServer("127.0.0.1")
    server.lines = LINES
    yield server
    server.close()


@pytest.fixture
def store(server: StoreServer) -> Iterator[Callable[..., RendezvousStore]]:
    stores: list[RendezvousStore] = []

    def make(prefix: str = "m", *, timeout_s: float = PATIENCE_S) -> RendezvousStore:
        deadline = time.monotonic() + timeout_s
        stores.append(RendezvousStore(server.dial, prefix, lines=LINES, deadline=deadline))
        return stores[-1]

    yield make
    for each in stores:
        each.close()


KEY = b"key of this job"
LINES = MemberLines(KEY, me="w0")

Open = Callable[..., RendezvousStore]


def test_notes_reach_everybody_of_the_same_meeting_only(store: Open) -> None:
    first, second, other = store(), store(), store("n", timeout_s=0.2)
    waiting = Work.start(lambda: second.get("k"), name="waits")
    first.set("k", b"\x00value")
    assert waiting.wait(PATIENCE_S) == b"\x00value"
    second.wait(["k"])
    with pytest.raises(DeadlineExceeded):
        other.get("k")


def test_notes_are_swapped_all_at_once(store: Open) -> None:
    first, second = store(), store()
    waiting = Work.start(lambda: second.swap({"b": b"2"}, ["a", "b", "c"]), name="waits")
    assert first.swap({"a": b"1"}, ["b"]) == [b"2"]
    with pytest.raises(DeadlineExceeded):
        waiting.wait(0.3)
    first.set("c", b"3")
    assert waiting.wait(PATIENCE_S) == [b"1", b"2", b"3"]


def test_wait_ends_when_its_store_is_closed(store: Open) -> None:
    mine = store(timeout_s=PATIENCE_S)
    waiting = Work.start(lambda: mine.get("never"), name="waits")
    with pytest.raises(DeadlineExceeded):
        waiting.wait(0.1)
    mine.close()
    with pytest.raises(PeerLost):
        waiting.wait(PATIENCE_S)


def test_closed_server_is_a_lost_peer_and_listens_no_more(server: StoreServer, store: Open) -> None:
    server.close()
    assert not answers(server.dial, timeout_s=1.0)
    with pytest.raises(PeerLost):
        store()


def test_server_that_does_not_answer_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_tls, "HANDSHAKE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dial = f"127.0.0.1:{silent.getsockname()[1]}"
        mine = RendezvousStore(dial, "m", lines=LINES, deadline=time.monotonic() + 0.3)
        began = time.monotonic()
        with pytest.raises(GroupError):
            mine.set("k", b"v")
        assert time.monotonic() - began < PROMPT_S
        mine.close()


def test_garbage_and_silence_do_no_harm(server: StoreServer, store: Open) -> None:
    lines = []
    for said in (b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x00"):
        line = socket.create_connection(split_host_port(server.dial), timeout=PATIENCE_S)
        line.sendall(said)
        lines.append(line)
    mine = store()
    mine.set("k", b"v")
    assert mine.get("k") == b"v"
    for line in lines:
        line.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_stranger_neither_reads_nor_writes(
    server: StoreServer, store: Open, encrypted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = MemberLines(b"of another job", me="w0", encrypted=encrypted)
    mine = store()
    mine.set("k", b"v")
    if not encrypted:  # it waits for the store's greeting, which waits for its handshake
        monkeypatch.setattr(member_tls, "HANDSHAKE_S", 1.0)
    for value in (b"forged", None):
        deadline = time.monotonic() + PATIENCE_S
        stranger = RendezvousStore(server.dial, "m", lines=lines, deadline=deadline)
        with pytest.raises(PeerLost):
            stranger.get("k") if value is None else stranger.set("k", value)
        stranger.close()
    assert mine.get("k") == b"v"


def test_server_serves_no_one_before_it_knows_the_key(server: StoreServer) -> None:
    server.lines = None
    early = RendezvousStore(server.dial, "m", lines=LINES, deadline=time.monotonic() + PATIENCE_S)
    with pytest.raises(PeerLost):
        early.get("k")
    early.close()


def test_what_was_overheard_is_of_no_use_elsewhere(server: StoreServer) -> None:
    """A relay in the middle records a whole connection and plays it to the server again."""
    plain = server.lines = MemberLines(KEY, me="w0", encrypted=False)
    recorded = bytearray()
    with (
        socket.create_server(("127.0.0.1", 0)) as middle,
        socket.create_connection(split_host_port(server.dial)) as behind,
    ):
        dial = f"127.0.0.1:{middle.getsockname()[1]}"

        def talk() -> None:
            mine = RendezvousStore(dial, "m", lines=plain, deadline=time.monotonic() + PATIENCE_S)
            with pytest.raises(PeerLost):
                mine.set("k", b"v")
            mine.close()

        work = Work.start(talk, name="member")
        line, _ = middle.accept()
        with line:
            line.sendall(behind.recv(64))  # the challenge
            recorded += line.recv(4096)
        work.wait(PATIENCE_S)
    with socket.create_connection(split_host_port(server.dial)) as again:
        again.settimeout(PATIENCE_S)
        again.recv(64)
        again.sendall(recorded)
        assert again.recv(64) == b"", "refused, and closed"
    assert not server._notes


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_lines_deliver_in_order_or_refuse(bodies: list[bytes], data: st.DataObject) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for end in (ours, theirs):
            end.settimeout(PATIENCE_S)
        listening = AuthenticatedLine.listening(ours, key=KEY)
        dialling = AuthenticatedLine.dialling(theirs, key=KEY)
        for body in bodies:
            dialling.send(body)
            assert listening.receive(most=50) == body
            listening.send(body[::-1])
            assert dialling.receive(most=50) == body[::-1]
        dialling.send(b"the last one")
        sent = bytearray(ours.recv(4096))
        flipped = data.draw(st.integers(4, len(sent) - 1))  # all but the length
        sent[flipped] ^= 1 << data.draw(st.integers(0, 7))
        theirs.sendall(sent)
        with pytest.raises(AuthError, match="does not know the job's key"):
            listening.receive(most=50)


def test_old_notes_fall_off(server: StoreServer, store: Open) -> None:
    mine = store()
    for number in range(MAX_NOTES + 5):
        mine.set(str(number), b"v")
    assert len(server._notes) == MAX_NOTES
    assert "m/4" not in server._notes


def test_closing_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    for _ in range(5):
        StoreServer("127.0.0.1").close()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_a_store_that_is_named_wrongly_is_one_that_is_lost() -> None:
    with pytest.raises(PeerLost, match="does not answer"):
        RendezvousStore("nonsense", "m", lines=LINES, deadline=time.monotonic() + PATIENCE_S)
