from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from atoll.errors import DeadlineExceeded, GroupError, PeerLost
from atoll.group.base import Work
from atoll.group.routes.rendezvous_store import (
    MAX_NOTES,
    RendezvousBoard,
    RendezvousStore,
    answers,
    split_host_port,
)
from tests.patience import PATIENCE_S, PROMPT_S


@pytest.fixture
def board() -> Iterator[RendezvousBoard]:
    board = RendezvousBoard("127.0.0.1")
    yield board
    board.close()


@pytest.fixture
def store(board: RendezvousBoard) -> Iterator[Callable[..., RendezvousStore]]:
    stores: list[RendezvousStore] = []

    def make(prefix: str = "m", *, timeout_s: float = PATIENCE_S) -> RendezvousStore:
        stores.append(RendezvousStore(board.dial, prefix, deadline=time.monotonic() + timeout_s))
        return stores[-1]

    yield make
    for each in stores:
        each.close()


Open = Callable[..., RendezvousStore]


def test_notes_reach_everybody_of_the_same_meeting_only(store: Open) -> None:
    first, second, other = store(), store(), store("n", timeout_s=0.2)
    waiting = Work.start(lambda: second.get("k"), name="waits")
    first.set("k", b"\x00value")
    assert waiting.wait(PATIENCE_S) == b"\x00value"
    second.wait(["k"])
    with pytest.raises(DeadlineExceeded):
        other.get("k")


def test_wait_ends_when_its_store_is_closed(store: Open) -> None:
    mine = store(timeout_s=PATIENCE_S)
    waiting = Work.start(lambda: mine.get("never"), name="waits")
    with pytest.raises(DeadlineExceeded):
        waiting.wait(0.1)
    mine.close()
    with pytest.raises(PeerLost):
        waiting.wait(PATIENCE_S)


def test_closed_board_is_a_lost_peer_and_listens_no_more(
    board: RendezvousBoard, store: Open
) -> None:
    board.close()
    assert not answers(board.dial, timeout_s=1.0)
    with pytest.raises(PeerLost):
        store()


def test_board_that_does_not_answer_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        dial = f"127.0.0.1:{silent.getsockname()[1]}"
        mine = RendezvousStore(dial, "m", deadline=time.monotonic() + 0.3)
        began = time.monotonic()
        with pytest.raises(GroupError):
            mine.set("k", b"v")
        assert time.monotonic() - began < PROMPT_S
        mine.close()


def test_garbage_and_silence_do_no_harm(board: RendezvousBoard, store: Open) -> None:
    lines = []
    for said in (b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1", b"\x00\x00"):
        line = socket.create_connection(split_host_port(board.dial), timeout=PATIENCE_S)
        line.sendall(said)
        lines.append(line)
    mine = store()
    mine.set("k", b"v")
    assert mine.get("k") == b"v"
    for line in lines:
        line.close()


def test_old_notes_fall_off(board: RendezvousBoard, store: Open) -> None:
    mine = store()
    for number in range(MAX_NOTES + 5):
        mine.set(str(number), b"v")
    assert len(board._notes) == MAX_NOTES
    assert "m/4" not in board._notes


def test_closing_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    for _ in range(5):
        RendezvousBoard("127.0.0.1").close()
    deadline = time.monotonic() + PATIENCE_S
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
