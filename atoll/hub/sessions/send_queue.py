"""The send queue of one session: control frames first, then relayed frames."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from dataclasses import dataclass
from typing import Any

from atoll.wire.frames import Buffer

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

CONTROL_LIMIT_BYTES = 16 * 2**20
"""Unread control bytes above which the connection is closed."""


@dataclass(slots=True, eq=False)
class RelayFrame:
    """A relayed frame, and the connection that it is credited to."""

    source: str
    generation: int
    raw: Buffer


def _try_write(send: Send, frame: bytes) -> bool:
    """Write a frame if the connection accepts it without waiting; return whether it did.

    Most answers take this path, because waking the writer task costs more than writing.
    """
    writing = send({"type": "websocket.send", "bytes": frame})
    if not isinstance(writing, Coroutine):
        return False
    try:
        writing.send(None)
    except StopIteration:
        return True
    except OSError:
        return False  # writer and reader will see the error too
    writing.close()  # it would wait, so nothing is written yet
    return False


class SendQueue:
    """Frames for one session. It outlives a connection, so a short break loses nothing queued.

    A frame is removed after the connection accepted it. At most one relayed frame precedes a
    control frame.
    """

    def __init__(self, *, on_written: Callable[[RelayFrame], None]) -> None:
        """`on_written` is called for each relayed frame that was written."""
        self._on_written = on_written
        self._control: deque[tuple[bytes, bool]] = deque()
        self._relayed: deque[RelayFrame] = deque()
        self._wake = asyncio.Event()
        self._idle: Send | None = None
        """`send` of the connection while its writer waits for frames."""
        self.control_bytes = 0
        self.relay_bytes = 0

    def put_control(self, frame: bytes, *, transient: bool = False) -> bool:
        """Queue a frame (`transient`: for this connection only); False: too much is unread."""
        if self._idle is not None and _try_write(self._idle, frame):
            return True
        if self.control_bytes + len(frame) > CONTROL_LIMIT_BYTES:
            return False
        self._idle = None
        self._control.append((frame, transient))
        self.control_bytes += len(frame)
        self._wake.set()
        return True

    def put_relayed(self, frame: RelayFrame) -> None:
        """Queue a relayed frame; the caller enforces the window."""
        self._idle = None  # later frames must queue behind it
        self._relayed.append(frame)
        self.relay_bytes += len(frame.raw)
        self._wake.set()

    def take_relayed(self, match: Callable[[RelayFrame], bool] | None = None) -> list[RelayFrame]:
        """Remove and return the queued relayed frames that `match` (None: all)."""
        removed = [frame for frame in self._relayed if match is None or match(frame)]
        if removed:
            gone = set(map(id, removed))
            self._relayed = deque(p for p in self._relayed if id(p) not in gone)
            self.relay_bytes -= sum(len(frame.raw) for frame in removed)
        return removed

    def drop_transient(self) -> None:
        """Drop frames that only the last connection could use."""
        self._control = deque(entry for entry in self._control if not entry[1])
        self.control_bytes = sum(len(frame) for frame, _ in self._control)

    async def drain(self, send: Send) -> None:
        """Write frames until cancelled, or the connection breaks, which its reader reports.

        A connection has one such writer. ``send`` waits first and writes at its end, so a frame
        with a cancelled ``send`` was not written and stays first in the queue.
        """
        with contextlib.suppress(OSError):
            while True:
                if self._control:
                    entry = self._control[0]
                    await send({"type": "websocket.send", "bytes": entry[0]})
                    if self._control and self._control[0] is entry:
                        self._control.popleft()
                        self.control_bytes -= len(entry[0])
                elif self._relayed:
                    frame = self._relayed[0]
                    await send({"type": "websocket.send", "bytes": frame.raw})
                    if self._relayed and self._relayed[0] is frame:
                        self._relayed.popleft()
                        self.relay_bytes -= len(frame.raw)
                        self._on_written(frame)
                else:
                    self._wake.clear()
                    self._idle = send
                    try:
                        await self._wake.wait()
                    finally:
                        self._idle = None
