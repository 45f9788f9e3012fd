"""Blocking work beside the event loop that ends soon when nobody wants it any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

ENDING_S = 5.0
"""How long the end of work that nobody wants any more is waited for."""


class Unwanted(Exception):
    """Ends the work from inside: whoever asked for it was cancelled."""


class Wanted:
    """Tells the work whether it is still wanted."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def end(self) -> None:
        """Ask the work to end."""
        self._ended.set()

    def check(self, *_: object) -> None:
        """Raise Unwanted if the work is to end; takes what callbacks of progress are given."""
        if self._ended.is_set():
            raise Unwanted

    def wait(self, timeout_s: float) -> None:
        """Sleep; raise Unwanted as soon as the work is to end."""
        if self._ended.wait(timeout_s):
            raise Unwanted


async def in_thread(work: Callable[[Wanted], T]) -> T:
    """Run `work` in a thread; when this is cancelled, ask it to end and wait a while for that."""
    wanted = Wanted()
    task = asyncio.ensure_future(asyncio.to_thread(work, wanted))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        wanted.end()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([task], timeout=ENDING_S)
        raise
