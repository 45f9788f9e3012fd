"""Blocking work beside the event loop, which does not delay the end of the agent."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_abandonable(work: Callable[[], T]) -> T:
    """Return the result of `work`, run on its own thread.

    On cancellation the work continues and its result is dropped. Unlike threads of the event loop's
    pool, this one does not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value: T | None = None
        error: BaseException | None = None
        try:
            value = work()
        except Exception as failure:  # raised by the awaiting task
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return await result


ENDING_S = 5.0
"""How long to wait for the end of abandoned work."""


class Abandoned(Exception):
    """Raised inside the work after its cancellation."""


class StillWanted:
    """Tells the work whether it was cancelled."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        """Ask the work to end."""
        self._ended.set()

    def check(self, *_: object) -> None:
        """Raise Abandoned after a cancellation; accepts the arguments of progress callbacks."""
        if self._ended.is_set():
            raise Abandoned

    def wait(self, timeout_s: float) -> None:
        """Sleep; raise Abandoned on a cancellation."""
        if self._ended.wait(timeout_s):
            raise Abandoned


async def in_thread(work: Callable[[StillWanted], T]) -> T:
    """Run `work` in a thread; on cancellation ask it to end and wait a while for that."""
    wanted = StillWanted()
    task = asyncio.ensure_future(asyncio.to_thread(work, wanted))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        wanted.end()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task], timeout=ENDING_S)
        raise
