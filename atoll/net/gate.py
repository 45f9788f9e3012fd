"""Back-pressure of a link: when it may stop reading its socket, and when it must not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class ReadingGate:
    """Closed while readers want no more, unless somebody waits for what would come through it.

    A session that stops reading leaves relayed frames at the hub, whose window then stops their
    senders. But answers and credit come through the same socket: while a request or a relay of
    the session waits, the gate stays open, so that two full sessions cannot block each other.
    """

    def __init__(self) -> None:
        self._held = False
        self._waiting = 0
        self._open = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Whether reading has to stop now."""
        return self._held and not self._waiting

    def hold(self) -> None:
        """Readers want no more."""
        self._held = True
        self._update()

    def release(self) -> None:
        """Readers take more again."""
        self._held = False
        self._update()

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Keep the gate open for the length of a `with` block."""
        self._waiting += 1
        self._update()
        try:
            yield
        finally:
            self._waiting -= 1
            self._update()

    async def passed(self) -> bool:
        """Wait until reading may go on; return whether it had to stop."""
        waited = False
        while self.closed:
            waited = True
            await self._open.wait()
        return waited

    def _update(self) -> None:
        if self.closed:
            self._open.clear()
        else:
            self._open.set()
