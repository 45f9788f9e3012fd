"""uvicorn's protocols with limits on unauthenticated peers.

uvicorn does not limit the time of a request head, counts connections only after the TLS handshake,
and hides client certificates. tests/security fails if the internals used here change.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import os
import ssl
from collections.abc import Callable
from typing import Any, cast

import h11
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from atoll.errors import ConfigError
from atoll.hub.security.certificates import serial_text
from atoll.hub.security.connection_limits import ConnectionLimiter, ConnectionSlot, PeerCertificate
from atoll.hub.sessions.fast_websocket import FastWebSocketProtocol

FIRST_FRAME_BYTES = 64 * 1024
"""Largest message before authentication; a Hello has a few hundred bytes."""

TLS_BUFFER_BYTES = asyncio.sslproto.SSLProtocol.max_size
"""Size of the one read buffer of all TLS connections; asyncio has 256 KiB for each of them."""

WRITE_BYTES = 64 * 1024
"""Unsent bytes above which senders wait; asyncio's 512 KiB under TLS would delay heartbeats on slow
lines.
"""

TLS_HANDSHAKE = 0x16

LINGER_S = 5.0
"""Time for the rest of a request after its response was sent."""


class HttpProtocol(H11Protocol):
    """One HTTP connection with time limits for request heads and for pauses in bodies."""

    def __init__(self, *arguments: Any, limiter: ConnectionLimiter, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._limiter = limiter
        self.slot: ConnectionSlot | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_read = 0.0
        self._upgraded = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start, unless there are too many unauthenticated connections."""
        opened = cast("asyncio.Transport", transport)
        if self.slot is None:
            self.slot = self._limiter.enter(_address(opened), opened.abort)
        if self.slot is None:
            self.transport = opened
            opened.abort()
            return
        self.slot.secure = opened.get_extra_info("sslcontext") is not None
        self.slot.certificate = _certificate(opened)
        opened.set_write_buffer_limits(high=WRITE_BYTES)
        self.app_state = {**self.app_state, "connection_slot": self.slot}
        super().connection_made(opened)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection slot."""
        self._stop_timer()
        super().connection_lost(exc)
        if self.slot is not None:
            self.slot.leave()

    def data_received(self, data: bytes) -> None:
        """Read; a request head must be complete in time."""
        self._last_read = self.loop.time()
        super().data_received(data)
        if self._upgraded:
            return  # uvicorn leaves the request in a state that expects a body
        if self.conn.their_state is h11.IDLE:
            if self._timer is None and not self.transport.is_closing():
                self._expect_head()
        elif self.conn.their_state is h11.SEND_BODY:
            if self._timer is None:
                self._expect_body()
        else:
            self._stop_timer()

    def handle_events(self) -> None:
        """Process events; a change of state ends the current timer."""
        before = self.conn.their_state
        super().handle_events()
        if self.conn.their_state is not before:
            self._stop_timer()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Pass the connection to the WebSocket protocol."""
        self._upgraded = True
        self._stop_timer()
        super().handle_websocket_upgrade(event)

    def on_response_complete(self) -> None:
        """Limit the time for the rest of a request that was already answered."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._stop_timer()
            self._timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self._limiter.limits.head_s, self.transport.abort)

    def _expect_body(self) -> None:
        self._timer = self.loop.call_later(self._limiter.limits.body_pause_s, self._check_body)

    def _check_body(self) -> None:
        """Close on a pause in the body, unless this side paused reading."""
        self._timer = None
        if self.flow.read_paused:
            self._last_read = self.loop.time()
        if self.loop.time() - self._last_read >= self._limiter.limits.body_pause_s:
            self.transport.abort()
        elif self.conn.their_state is h11.SEND_BODY:
            self._expect_body()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class WebSocketProtocol(FastWebSocketProtocol):
    """One WebSocket; it accepts only small messages before authentication."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._slot: ConnectionSlot | None = app_state.get("connection_slot")
        if self._slot is not None:
            self.conn.max_message_size = FIRST_FRAME_BYTES
            self._slot.on_authenticated = self._allow_large_messages

    def _allow_large_messages(self) -> None:
        self.conn.max_message_size = self.config.ws_max_size

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection slot."""
        super().connection_lost(exc)
        if self._slot is not None:
            self._slot.leave()


class TlsProtocol(asyncio.sslproto.SSLProtocol):
    """TLS below an `HttpProtocol`; a connection is counted from its first packet."""

    def __init__(
        self,
        http: HttpProtocol,
        context: ssl.SSLContext,
        *,
        limiter: ConnectionLimiter,
        buffer: bytearray | None,
    ) -> None:
        """Prepare one connection; `buffer` is the shared read buffer, None: its own."""
        limits: dict[str, Any] = {
            "ssl_handshake_timeout": limiter.limits.head_s,
            "ssl_shutdown_timeout": 1.0,
        }
        no_waiter: Any = None
        loop = asyncio.get_running_loop()
        super().__init__(loop, http, context, no_waiter, server_side=True, **limits)
        if buffer is not None:
            self._ssl_buffer, self._ssl_buffer_view = buffer, memoryview(buffer)
        self._http: HttpProtocol | None = http
        self._limiter = limiter
        self._slot: ConnectionSlot | None = None
        self._started = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake, unless there are too many unauthenticated connections."""
        raw, http = cast("asyncio.Transport", transport), self._http
        self._slot = self._limiter.enter(_address(raw), raw.abort)
        self._http = None  # a WebSocket may replace it, and it occupies 10 kB
        if self._slot is None or http is None:
            raw.abort()
            return
        http.slot = self._slot
        super().connection_made(transport)

    def buffer_updated(self, nbytes: int) -> None:
        """Read; a client that speaks plain HTTP gets an answer in plain HTTP."""
        if not self._started:
            self._started = True
            raw: Any = self._transport
            if nbytes and self._ssl_buffer_view[0] != TLS_HANDSHAKE and raw is not None:
                raw.write(_NO_TLS)
                raw.close()
                return
        super().buffer_updated(nbytes)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection slot, also after a failed handshake."""
        if self._slot is not None:
            super().connection_lost(exc)
            self._slot.leave()


def protocol_factory(
    limiter: ConnectionLimiter, context: Callable[[], ssl.SSLContext] | None
) -> Callable[..., asyncio.BaseProtocol]:
    """Return the factory of connections for uvicorn: HTTP, or HTTP over TLS.

    `context` returns the settings of TLS for a new connection.
    """
    # Event loops that read synchronously into the buffer can share one over all connections.
    shared = bytearray(TLS_BUFFER_BYTES) if os.name == "posix" else None

    def make(**options: Any) -> asyncio.BaseProtocol:
        http = HttpProtocol(**options, limiter=limiter)
        if context is None:
            return http
        return TlsProtocol(http, context(), limiter=limiter, buffer=shared)

    return make


def _plain_refusal() -> bytes:
    error = ConfigError(
        "this hub requires TLS",
        given="plain HTTP",
        expected="https://, or a whole ticket: the part after ~ authenticates the hub",
    )
    body = msgspec.json.encode({"error": error.to_dict()})
    head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close"
    return f"{head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


_NO_TLS = _plain_refusal()


def _address(transport: asyncio.BaseTransport) -> str:
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple) and peer else ""


def _certificate(transport: asyncio.BaseTransport) -> PeerCertificate | None:
    shown: Any = transport.get_extra_info("peercert")
    if not shown:
        return None
    names = [value for part in shown["subject"] for key, value in part if key == "commonName"]
    number = int(shown["serialNumber"], 16)  # OpenSSL may write a leading zero
    return PeerCertificate(names[0] if names else "", serial_text(number))
