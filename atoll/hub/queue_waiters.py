"""Who waits for items of a queue or topic."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

MAX_WAIT_S = 60.0
"""Longest that one claim waits for its first item, and one put for room."""


class Waiters:
    """Those who wait for an item, in line per queue: one put wakes one of them, not all."""

    def __init__(self) -> None:
        self._lines: dict[str, collections.deque[asyncio.Future[None]]] = {}

    def wake(self, queue: str, number: int = 1) -> None:
        """Wake those who have waited longest at this queue, so many if there are."""
        line = self._lines.get(queue)
        while line and number > 0:
            woken = line.popleft()
            if not woken.done():
                woken.set_result(None)
                number -= 1

    def wake_all(self, queue: str) -> None:
        """Wake everybody at this queue."""
        self.wake(queue, len(self._lines.get(queue, ())))

    def number(self, queue: str) -> int:
        """Return how many wait at this queue."""
        return len(self._lines.get(queue, ()))

    async def until_some(
        self,
        queue: str,
        attempt: Callable[[], Awaitable[list[T]]],
        *,
        limit: int,
        wait_s: float,
    ) -> list[T]:
        """Return what `attempt` finds, trying again at every wake-up until the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MAX_WAIT_S)
        more = True  # whoever leaves without having emptied the queue wakes the next in line
        woken: asyncio.Future[None] = loop.create_future()
        try:
            while True:
                # In line before looking: a put in between must find somebody to wake.
                woken = loop.create_future()
                self._lines.setdefault(queue, collections.deque()).append(woken)
                items = await attempt()
                left_s = deadline - loop.time()
                if items or left_s <= 0:
                    more = len(items) == limit
                    return items
                await asyncio.wait([woken], timeout=left_s)
                self._leave(queue, woken)
        finally:
            self._leave(queue, woken)
            if more:
                self.wake(queue)

    def _leave(self, queue: str, woken: asyncio.Future[None]) -> None:
        line = self._lines.get(queue)
        if line is None:
            return
        if woken in line:
            line.remove(woken)
        if not line:
            del self._lines[queue]
