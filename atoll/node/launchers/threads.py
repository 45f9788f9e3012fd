"""Results of threads that wait for a process, delivered to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TypeVar

T = TypeVar("T")


def tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[T], value: T) -> None:
    """Set a future of the loop from another thread; ignored if the loop is closed."""

    def tell_here() -> None:
        if not future.done():
            future.set_result(value)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(tell_here)
