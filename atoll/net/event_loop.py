"""An event loop on its own thread: the only bridge between threads and asyncio.

Training code stays synchronous. It waits on locks of the operating system with a timeout, so that a
waiting thread costs nothing and does not hold the GIL.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from atoll.errors import DeadlineExceeded, HubError

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0  # of starting and of stopping the thread


class LoopThread:
    """An event loop that runs in a daemon thread between `start` and `stop`."""

    def __init__(self, *, name: str = "atoll-link") -> None:
        self._name = name
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._quit: asyncio.Event | None = None

    @property
    def running(self) -> bool:
        """Whether it is started and not stopped."""
        return self._loop is not None and not self._loop.is_closed()

    def start(self) -> None:
        """Start the thread; return when the loop runs."""
        self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
        self._thread.start()
        self._ready.wait(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Cancel the tasks of the loop and end the thread. Idempotent."""
        thread, quit_ = self._thread, self._quit
        if thread is None or quit_ is None or not thread.is_alive():
            return
        self.call(quit_.set)
        if thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule a coroutine and return its future; raises HubError if the loop has ended."""
        loop = self._loop
        if loop is None or not self.running:
            coro.close()
            raise HubError("this link to the hub is closed")
        return asyncio.run_coroutine_threadsafe(coro, loop)

    def run(self, coro: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
        """Run a coroutine on the loop and return its result.

        Raises:
            DeadlineExceeded: it took longer than `timeout_s`; it is cancelled.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("LoopThread.run was called on its own thread: it would wait forever")
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise HubError("this link to the hub was closed while a call was waiting") from None
        except TimeoutError:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(
                "a wait ended at its deadline", given=f"{timeout_s:g} s"
            ) from None
        except BaseException:  # e.g. Ctrl-C: do not leave the coroutine running
            future.cancel()
            raise

    def call(self, function: Callable[[], object]) -> None:
        """Schedule a function on the loop; does nothing if the loop has ended."""
        loop = self._loop
        if loop is not None and self.running:
            try:
                loop.call_soon_threadsafe(function)
            except RuntimeError:  # the loop closed after the check
                return

    def _main(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._quit = asyncio.Event()
        self._ready.set()
        await self._quit.wait()
