"""The common frames of a WebSocket without the detour: whole binary messages, in and out.

uvicorn runs every frame through a general state machine, stops reading after each and starts again.
A busy hub spends most of its time there. Here a whole, masked, unfragmented binary frame is taken
directly, and a binary message is written directly. Everything else (the handshake, control frames,
fragments, text, anything odd or too large) goes the ordinary way, which decides what is wrong with
it: the machine sees whole frames only, so it always stands between two of them.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets import frames
from websockets.protocol import OPEN

_apply_mask: Any = vars(frames)["apply_mask"]
"""Compiled where the package has it compiled."""

QUEUED_BYTES = 256 * 2**10
"""Bytes of messages that may wait for the application before nothing more is read."""

_BINARY = 0x82
_MASKED = 0x80
_CONTROL = (0x88, 0x89, 0x8A)
"""First bytes of whole close, ping and pong frames."""
_WRITE_AT_ONCE = 64 * 2**10
"""Larger messages are not copied to put their head before them."""


class FastWebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket with a short way for what comes most."""

    _partial: bytes | bytearray = b""
    """Beginning of a frame whose end has not come; a bytearray from its second piece on."""
    _needed_bytes = 0
    """Bytes from which on `_partial` may be a whole frame."""
    _request_seen = False
    """Whether the request has come; nothing may follow before it is answered."""
    _fallback = False
    """Whether the machine takes everything from now on."""
    _queued_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Take whole frames; keep the beginning of the next one."""
        if self._fallback or not self.handshake_complete:
            self._fallback, self._request_seen = self._fallback or self._request_seen, True
            super().data_received(data)
            return
        if not self._partial:
            self._parse_frames(bytes(data))
            return
        partial: Any = self._partial
        partial = partial if isinstance(partial, bytearray) else bytearray(partial)
        partial += data
        if len(partial) < self._needed_bytes:
            self._partial = partial
        else:
            self._parse_frames(bytes(partial))

    def _parse_frames(self, data: bytes) -> None:
        size, at = len(data), 0
        self._partial, self._needed_bytes = b"", 0
        while at < size:
            end = _payload_bounds(data, at, size)
            if end is None:  # not even its head is whole
                if not _may_be_supported(data[at : at + 2]):
                    self._fallback = True
                    super().data_received(data[at:])
                    return
                break
            head, body = end
            fast = data[at] == _BINARY and data[at + 1] & _MASKED and self._accepts(body - head)
            if fast and body <= size:
                self._received(_apply_mask(data[head:body], data[head - 4 : head]))
            elif fast:
                self._needed_bytes = body - at
                break
            elif data[at] in _CONTROL and body <= size:
                super().data_received(data[at:body])
            else:
                self._fallback = True
                super().data_received(data[at:])
                return
            at = body
        self._partial = data[at:]

    def _accepts(self, nbytes: int) -> bool:
        """Return whether a message of this size may come, and the machine is open."""
        limit = self.conn.max_message_size
        return (limit is None or nbytes <= limit) and self.conn.state is OPEN

    def _received(self, payload: bytes) -> None:
        if self.close_sent:
            return
        self.queue.put_nowait({"type": "websocket.receive", "bytes": payload})
        self._queued_bytes += len(payload)
        if self._queued_bytes > QUEUED_BYTES and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    async def receive(self) -> Any:
        """Return the next event; read on when nothing waits any more."""
        message = await super().receive()
        if self.queue.empty():
            self._queued_bytes = 0
        return message

    def _drop_handshake(self) -> None:
        """Let go of request and response: 3 kB that nobody asks for on an open connection."""
        for name in ("request", "response"):
            vars(self).pop(name, None)

    async def send(self, message: Any) -> None:
        """Write a binary message directly."""
        payload = message.get("bytes") if message["type"] == "websocket.send" else None
        if (
            payload is None
            or not self.handshake_complete
            or self.close_sent
            or self.initial_response is not None
            or self.conn.state is not OPEN
        ):
            await super().send(message)
            if self.handshake_complete:
                self._drop_handshake()
            return
        if not self.writable.is_set():
            await self.writable.wait()
        if self.disconnected or self.conn.state is not OPEN:
            await super().send(message)
            return
        head = _frame_head(len(payload))
        if len(payload) < _WRITE_AT_ONCE:
            self.transport.write(head + payload)
        else:
            self.transport.writelines((head, payload))


def _may_be_supported(start: bytes) -> bool:
    """Return whether a frame that begins so can be one that this class understands."""
    known = start[0] == _BINARY or start[0] in _CONTROL
    return known and (len(start) < 2 or bool(start[1] & _MASKED))


def _payload_bounds(data: bytes, at: int, size: int) -> tuple[int, int] | None:
    """Return where the payload of a masked frame begins and ends; None while its head is cut."""
    if size - at < 2:
        return None
    length, head = data[at + 1] & 0x7F, 2
    if length == 126:
        length, head = int.from_bytes(data[at + 2 : at + 4], "big"), 4
    elif length == 127:
        length, head = int.from_bytes(data[at + 2 : at + 10], "big"), 10
    if data[at + 1] & _MASKED:
        head += 4
    if size - at < head:
        return None
    return at + head, at + head + length


def _frame_head(length: int) -> bytes:
    """Return the head of a binary frame of a server."""
    if length < 126:
        return bytes((_BINARY, length))
    if length < 65_536:
        return bytes((_BINARY, 126)) + length.to_bytes(2, "big")
    return bytes((_BINARY, 127)) + length.to_bytes(8, "big")
