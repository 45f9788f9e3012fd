from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from atoll.errors import DeadlineExceeded, HubError
from atoll.net.event_loop import LoopThread
from tests.patience import PATIENCE_S


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread(name="test")
    thread.start()
    yield thread
    thread.stop()


async def give(value: int) -> int:
    return value


def test_coroutine_result_returns_across_threads(loop: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert loop.run(where(), timeout_s=PATIENCE_S) == "test"
    assert loop.submit(give(3)).result(PATIENCE_S) == 3


def test_an_error_comes_back_as_it_was_raised(loop: LoopThread) -> None:
    async def fail() -> None:
        raise KeyError("here")

    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(KeyError, match="here"):
        loop.run(fail(), timeout_s=PATIENCE_S)
    with pytest.raises(TimeoutError, match="its own"):
        loop.run(late(), timeout_s=PATIENCE_S)


def test_wait_ends_at_its_deadline_and_cancels(loop: LoopThread) -> None:
    ended = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        loop.run(forever(), timeout_s=0.05)
    assert ended.wait(PATIENCE_S)


def test_stopping_ends_those_who_wait_and_those_who_come_later() -> None:
    thread = LoopThread()
    thread.start()
    started = threading.Event()

    async def forever() -> None:
        started.set()
        await asyncio.Event().wait()

    errors: list[BaseException] = []

    def wait() -> None:
        try:
            thread.run(forever(), timeout_s=PATIENCE_S)
        except HubError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert started.wait(PATIENCE_S)
    thread.stop()
    waiting.join(PATIENCE_S)
    assert "closed while a call was waiting" in str(errors[0])
    with pytest.raises(HubError, match="closed"):
        thread.run(give(1), timeout_s=1.0)
    thread.call(lambda: None)
    thread.stop()


def test_waiting_for_oneself_is_refused(loop: LoopThread) -> None:
    async def deadlock() -> None:
        loop.run(give(1), timeout_s=1.0)

    with pytest.raises(RuntimeError, match="wait forever"):
        loop.run(deadlock(), timeout_s=PATIENCE_S)
