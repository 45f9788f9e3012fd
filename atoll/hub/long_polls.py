"""Long polls: a request of a member is answered at the next change that concerns it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atoll.clock import Clock

T = TypeVar("T")

POLL_S = 5.0
"""A request without news is answered after this long, so that none stays open for a lost member."""


class LongPolls:
    """The requests that wait for the next change of one job's ledger."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def wake(self) -> None:
        """Let waiting requests look again."""
        self._next.set()
        self._next = asyncio.Event()

    async def when(
        self, look: Callable[[], Awaitable[T | None]], *, open_: Callable[[], bool], clock: Clock
    ) -> T | None:
        """Return what `look` finds, now or after a change.

        None after `POLL_S`, and as soon as the request is not `open_` any more.
        """
        deadline = clock.monotonic() + POLL_S
        while True:
            changed = self._next
            found = await look()
            left_s = deadline - clock.monotonic()
            if found is not None or left_s <= 0 or not open_():
                return found
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return None
