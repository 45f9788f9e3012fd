from __future__ import annotations

import threading

import pytest

from atoll.errors import DeadlineExceeded
from atoll.state_lock import StateLock
from tests.patience import PATIENCE_S

WAIT_S = PATIENCE_S


def test_a_reader_sees_no_state_that_moves() -> None:
    state_lock, state, torn = StateLock(), [0, 0], []
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            with state_lock.still(timeout_s=WAIT_S):
                torn.append(state[0] != state[1])

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for _ in range(2_000):
        with state_lock.moving():
            state[0] += 1
            state[1] += 1
    stop.set()
    for reader in readers:
        reader.join(WAIT_S)
    assert torn
    assert not any(torn)


def test_a_loop_without_pauses_cannot_keep_a_reader_out() -> None:
    state_lock, entered, done = StateLock(), threading.Event(), threading.Event()

    def read() -> None:
        with state_lock.still(timeout_s=WAIT_S):
            entered.set()
        done.set()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(1_000_000):
        with state_lock.moving():
            pass
        if done.is_set():
            break
    reader.join(WAIT_S)
    assert entered.is_set()


def test_pause_admits_readers_and_keeps_writers_out() -> None:
    state_lock, order = StateLock(), []
    inside, leave = threading.Event(), threading.Event()

    def read() -> None:
        with state_lock.still(timeout_s=WAIT_S):
            inside.set()
            assert leave.wait(WAIT_S)
            order.append("read")

    with state_lock.moving():
        reader = threading.Thread(target=read)
        with state_lock.resting():
            reader.start()
            assert inside.wait(WAIT_S)
            leave.set()
        order.append("moved")
    reader.join(WAIT_S)
    assert order == ["read", "moved"]


def test_endless_write_is_waited_for_until_the_timeout() -> None:
    state_lock, errors = StateLock(), []

    def read() -> None:
        try:
            with state_lock.still(timeout_s=0.05):
                pass
        except DeadlineExceeded as error:
            errors.append(error)

    with state_lock.moving():
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(WAIT_S)
    assert len(errors) == 1


def test_resting_outside_of_a_move_changes_nothing() -> None:
    state_lock = StateLock()
    with state_lock.resting(), state_lock.still(timeout_s=WAIT_S):
        pass
    with state_lock.moving(), pytest.raises(ZeroDivisionError), state_lock.resting():
        raise ZeroDivisionError
    with state_lock.still(timeout_s=WAIT_S):
        pass
