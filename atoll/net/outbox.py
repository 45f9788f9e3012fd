"""Ship small items to the hub in order and in batches, without blocking their producer.

Items wait in memory while the hub is unreachable. Each batch has the number of its first item; the
hub answers with the last durable number, and everything after it is sent again. When the buffer is
full, only items that were never sent are thinned, so numbers have no gaps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from atoll.errors import AtollError, DeadlineExceeded, FrameTooLarge
from atoll.net.event_loop import LoopThread
from atoll.net.link import Link
from atoll.net.retry import backoff
from atoll.wire.messages import Acked, Message

logger = logging.getLogger(__name__)

T = TypeVar("T")

CAPACITY = 10_000
"""Items that may wait: hours of metrics at one per second."""

BATCH = 500

ANSWER_TIMEOUT_S = 60.0  # then a batch is sent again; after a reconnect the link does that at once


def keep_every_second(items: list[T]) -> list[T]:
    """Return the items without every second one of the older half; for metrics."""
    half = len(items) // 2
    return items[:half:2] + items[half:]


def drop_oldest(items: list[T]) -> list[T]:
    """Return the newer three quarters of the items; for log lines."""
    return items[len(items) // 4 :]


class Outbox(Generic[T]):
    """A bounded buffer of items for the hub; lives on the link's event loop."""

    def __init__(
        self,
        link: Link,
        make_message: Callable[[int, list[T]], Message],
        *,
        capacity: int = CAPACITY,
        batch: int = BATCH,
        thin: Callable[[list[T]], list[T]] = keep_every_second,
        first: int = 1,
        gather_s: float = 0.0,
    ) -> None:
        """Create an outbox on a started link; nothing is sent before `start`.

        Args:
            link: A started link.
            make_message: Makes the request from the number of the first item and the items; the
                hub's answer MUST be `Acked`.
            capacity: Items that may wait before they are thinned.
            batch: Most items per message.
            thin: Returns fewer items than it was given.
            first: Number of the first item; above 1 it continues another outbox.
            gather_s: Pause after a message that was not full: what comes meanwhile goes together.
        """
        self._link = link
        self._make_message = make_message
        self._capacity = capacity
        self._batch = batch
        self._thin = thin
        self.retry: Callable[[], Iterator[float]] = backoff
        """Pauses after failed requests."""
        self._gather_s = gather_s
        self._lock = threading.Lock()  # producers are threads, shipping runs on the event loop
        self._waiting: list[T] = []
        self._flight: list[T] = []
        self._first = first
        """Number of the first item in flight."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def next_seq(self) -> int:
        """Number of the first item that the hub has not acknowledged."""
        return self._first

    def start(self) -> None:
        """Start shipping; call it on the link's event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._ship(), name="outbox")

    def add(self, item: T) -> None:
        """Add an item without blocking, from any thread; thins the items if the buffer is full."""
        with self._lock:
            self._waiting.append(item)
            if len(self._waiting) > self._capacity:
                self._waiting = self._thin(self._waiting)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._stir)

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until the hub has acknowledged everything; return whether it has."""
        if self._task is None or (self._task.done() and not self._idle.is_set()):
            return False
        self._stir()
        idle = asyncio.ensure_future(self._idle.wait())
        await asyncio.wait(
            (idle, self._task), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        idle.cancel()
        return self._idle.is_set()

    async def close(self, *, timeout_s: float) -> bool:
        """Flush, then stop; return whether the hub has acknowledged everything."""
        complete = await self.flush(timeout_s=timeout_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        return complete

    def _stir(self) -> None:
        with self._lock:
            if not self._waiting and not self._flight:
                self._idle.set()
                return
        self._idle.clear()
        self._wake.set()

    async def _ship(self) -> None:
        waits = self.retry()
        while True:
            if not self._load():
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                message = self._make_message(self._first, self._flight)
                answer = await self._link.request(message, timeout_s=ANSWER_TIMEOUT_S)
            except DeadlineExceeded:
                continue  # send the same batch again; the hub ignores numbers that it has
            except AtollError as error:
                if self._link.failed is not None:
                    logger.info("%s: nothing more is shipped: %s", self._link.session, error)
                    return
                if isinstance(error, FrameTooLarge) and self._halve():
                    continue
                logger.warning("%s: the hub did not take a batch: %s", self._link.session, error)
                await asyncio.sleep(next(waits))
                continue
            full = len(self._flight) >= self._batch
            if isinstance(answer, Acked) and self._acked(answer.seq):
                waits = self.retry()
                if self._gather_s and not full:
                    await asyncio.sleep(self._gather_s)
            else:
                await asyncio.sleep(next(waits))

    def _load(self) -> bool:
        """Fill the batch in flight if it is empty; return whether there is one."""
        with self._lock:
            if not self._flight:
                self._flight = self._waiting[: self._batch]
                self._waiting = self._waiting[self._batch :]
            return bool(self._flight)

    def _halve(self) -> bool:
        """Take the second half of the batch in flight back; return whether there was one."""
        with self._lock:
            half = len(self._flight) // 2
            if half:
                self._waiting[:0] = self._flight[half:]
                del self._flight[half:]
            return half > 0

    def _acked(self, seq: int) -> bool:
        """Drop acknowledged items; return whether there were any."""
        with self._lock:
            count = min(seq - self._first + 1, len(self._flight))
            if count <= 0:
                return False
            self._flight = self._flight[count:]
            self._first += count
            return True


class SyncOutbox(Generic[T]):
    """An `Outbox` for threads; created by `SyncLink.outbox`."""

    def __init__(self, outbox: Outbox[T], loop: LoopThread) -> None:
        self._outbox = outbox
        self._loop = loop

    def add(self, item: T) -> None:
        """Add an item without waiting."""
        self._outbox.add(item)

    def flush(self, *, timeout_s: float) -> bool:
        """Wait until the hub has acknowledged everything; return whether it has."""
        return self._loop.run(self._outbox.flush(timeout_s=timeout_s), timeout_s=timeout_s + 5.0)

    def close(self, *, timeout_s: float) -> bool:
        """Flush, then stop; return whether the hub has acknowledged everything."""
        return self._loop.run(self._outbox.close(timeout_s=timeout_s), timeout_s=timeout_s + 5.0)
