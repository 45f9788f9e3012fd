"""What waits to be written to one session: control frames first, then relayed ones."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from atoll.wire.frames import Buffer

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONTROL_LIMIT_BYTES = 16 * 2**20
"""Answers that a session may leave unread before its connection is closed."""


@dataclass(slots=True, eq=False)
class Parcel:
    """One relayed frame on its way: the very bytes that came in, and whose window they fill."""

    source: str
    generation: int
    """Which connection of the source brought it."""
    raw: Buffer


class Outbox:
    """Frames for one session; it outlives a connection, so a short blip loses nothing queued.

    A frame leaves the queue only after the connection took it. At most one relayed frame is ahead
    of a control frame, whatever waits.
    """

    def __init__(self, *, settled: Callable[[Parcel], None]) -> None:
        """Call `settled` for each relayed frame that was written."""
        self._settled = settled
        self._control: deque[tuple[bytes, bool]] = deque()
        self._parcels: deque[Parcel] = deque()
        self._wake = asyncio.Event()
        self.control_bytes = 0
        self.relay_bytes = 0

    def put_control(self, frame: bytes, *, passing: bool = False) -> bool:
        """Queue a control frame; False when the reader left too much unread already.

        Args:
            frame: The bytes.
            passing: It means something on this connection only, as credit does.
        """
        if self.control_bytes + len(frame) > CONTROL_LIMIT_BYTES:
            return False
        self._control.append((frame, passing))
        self.control_bytes += len(frame)
        self._wake.set()
        return True

    def put_parcel(self, parcel: Parcel) -> None:
        """Queue a relayed frame; the caller keeps the books of its window."""
        self._parcels.append(parcel)
        self.relay_bytes += len(parcel.raw)
        self._wake.set()

    def take_parcels(self, chosen: Callable[[Parcel], bool] | None = None) -> list[Parcel]:
        """Remove and return the waiting relayed frames for which `chosen` is true (all: None)."""
        taken = [parcel for parcel in self._parcels if chosen is None or chosen(parcel)]
        if taken:
            gone = set(map(id, taken))
            self._parcels = deque(p for p in self._parcels if id(p) not in gone)
            self.relay_bytes -= sum(len(parcel.raw) for parcel in taken)
        return taken

    def drop_passing(self) -> None:
        """Forget what only the last connection could use: on a new one all windows are full."""
        self._control = deque(entry for entry in self._control if not entry[1])
        self.control_bytes = sum(len(frame) for frame, _ in self._control)

    async def drain(self, send: Send) -> None:
        """Write frames until cancelled: the one writer of a connection.

        ``send`` waits while the peer is slow and writes only at its very end, so a frame whose
        ``send`` is cancelled was not written and stays first in the queue.
        """
        while True:
            if self._control:
                entry = self._control[0]
                await send({"type": "websocket.send", "bytes": entry[0]})
                if self._control and self._control[0] is entry:
                    self._control.popleft()
                    self.control_bytes -= len(entry[0])
            elif self._parcels:
                parcel = self._parcels[0]
                await send({"type": "websocket.send", "bytes": parcel.raw})
                if self._parcels and self._parcels[0] is parcel:
                    self._parcels.popleft()
                    self.relay_bytes -= len(parcel.raw)
                    self._settled(parcel)
            else:
                self._wake.clear()
                await self._wake.wait()
