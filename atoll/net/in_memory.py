"""A connection within one process, for tests and simulations, with real back-pressure."""

from __future__ import annotations

import asyncio
from collections import deque

from atoll.net.transport import ABNORMAL, ConnectionLost
from atoll.wire.frames import Buffer


class _Way:
    """One direction: a bounded queue of messages."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.messages: deque[bytes] = deque()
        self.changed = asyncio.Event()
        self.ended: tuple[int, str] | None = None

    def end(self, code: int, reason: str) -> None:
        """Accept no more messages; queued ones can still be read."""
        if self.ended is None:
            self.ended = (code, reason)
        self.wake()

    def wake(self) -> None:
        """Wake both ends."""
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryTransport:
    """One end of a pair; satisfies `Transport`."""

    throttled = False

    def __init__(self, outgoing: _Way, incoming: _Way) -> None:
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, message: Buffer) -> None:
        """Queue one message; wait while `capacity` messages are unread."""
        endpoint = self._outgoing
        while endpoint.ended is None and len(endpoint.messages) >= endpoint.capacity:
            await endpoint.changed.wait()
        if endpoint.ended is not None:
            raise _lost(*endpoint.ended)
        endpoint.messages.append(bytes(message))
        endpoint.wake()

    async def receive(self) -> bytes:
        """Return the next message; those sent before an orderly close still arrive."""
        endpoint = self._incoming
        while not endpoint.messages:
            if endpoint.ended is not None:
                raise _lost(*endpoint.ended)
            await endpoint.changed.wait()
        message = endpoint.messages.popleft()
        endpoint.wake()
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close both directions in order."""
        self._outgoing.end(code, reason)
        self._incoming.end(code, reason)

    def cut(self) -> None:
        """Break the connection like a pulled cable: messages in flight are lost."""
        for endpoint in (self._outgoing, self._incoming):
            endpoint.messages.clear()
            endpoint.end(ABNORMAL, "")


def pair(*, capacity: int = 16) -> tuple[MemoryTransport, MemoryTransport]:
    """Return the two ends of a connection; each direction holds `capacity` unread messages."""
    there, back = _Way(capacity), _Way(capacity)
    return MemoryTransport(there, back), MemoryTransport(back, there)


def _lost(code: int, reason: str) -> ConnectionLost:
    return ConnectionLost("the connection ended", given=f"code {code}", code=code, reason=reason)
