"""The WebSocket transport to the hub's `/ws`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    ProxyError,
    WebSocketException,
)

from atoll.errors import HubUnreachable
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.proxies import at_address, for_websocket, hub_address, not_through, unreachable
from atoll.net.throttle import Throttle, throttle_of
from atoll.net.transport import ABNORMAL, ConnectionLost, Transport
from atoll.system import UNSENT_OPTION
from atoll.wire.frames import HEADER_BYTES, Buffer, Kind
from atoll.wire.limits import MAX_FRAME_BYTES, UNSENT_BYTES

CLOSE_TIMEOUT_S = 1.0
"""Wait for the closing handshake; a dead peer does not answer it."""


HELD_S = 0.1
MAX_HELD_BYTES = 4 * 2**20
"""The kernel's receive buffer under a download limit: `HELD_S` of data, at most this."""


class WebSocketTransport:
    """A `Transport` over one WebSocket of the `websockets` library."""

    def __init__(self, connection: ClientConnection, throttle: Throttle) -> None:
        self._connection = connection
        self._throttle = throttle
        self._paid_at = 0.0
        """Monotonic time at which the messages received so far are paid for."""

    @property
    def throttled(self) -> bool:
        """Whether the bandwidth limit keeps `receive` from reading."""
        return self._paid_at > time.monotonic()

    async def send(self, message: Buffer) -> None:
        """Send one binary message; wait while more than the write limit is unsent.

        Under a bandwidth limit only tensors wait.
        """
        await self._throttle.sent(len(message), urgent=_is_control(message))
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def receive(self) -> bytes:
        """Return the next message, once those before it are paid for.

        Under a bandwidth limit a message is returned as it arrives and the wait follows before the
        next one: a message in hand during the wait would be lost when the wait is cancelled.
        """
        while (wait_s := self._paid_at - time.monotonic()) > 0:
            await asyncio.sleep(wait_s)
        try:
            message = await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise _lost(error) from error
        wait_s = self._throttle.received(len(message), urgent=_is_control(message))
        self._paid_at = time.monotonic() + wait_s
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close; after `CLOSE_TIMEOUT_S` without an answer, abort."""
        self._throttle.close()
        await self._connection.close(code, reason)


def _is_control(message: Buffer) -> bool:
    return len(message) < HEADER_BYTES or message[3] != Kind.RELAY


async def dial(url: str, *, endpoint: HubEndpoint = PLAIN, timeout_s: float = 10.0) -> Transport:
    """Open a connection to the hub at ``http(s)://HOST:PORT[/PREFIX]``.

    Raises:
        HubUnreachable: with host, port and reason: refused, timed out, unknown name, not a hub.
        ConfigError: the URL has another form.
    """
    hub = hub_address(url)
    try:
        connection = await connect(
            hub.websocket,
            ssl=endpoint.context(secure=hub.secure),
            compression=None,  # tensors do not compress, and messages are small
            proxy=for_websocket(endpoint.proxy),
            ping_interval=None,  # heartbeats are messages of our own
            open_timeout=timeout_s,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_FRAME_BYTES,
            max_queue=1 if endpoint.download_bps else 16,
        )
    except ProxyError as error:
        raise not_through(endpoint.proxy, at_address(hub.host, hub.port), error) from error
    except (InvalidStatus, InvalidMessage, InvalidHandshake) as error:
        raise HubUnreachable(
            f"what answers at {at_address(hub.host, hub.port)} is not a hub",
            given=_answer(error),
            expected="a hub's WebSocket at /ws",
            remedy="check host and port: `atoll hub` prints them when it starts",
        ) from error
    except (OSError, TimeoutError, WebSocketException) as error:
        if endpoint.proxy and not isinstance(error, ssl.SSLError):
            raise not_through(endpoint.proxy, at_address(hub.host, hub.port), error) from error
        raise unreachable(url, error) from error
    except Exception as error:
        # The errors of the SOCKS library cannot be named here: it is an optional dependency.
        if not endpoint.proxy.startswith("socks"):
            raise
        raise not_through(endpoint.proxy, at_address(hub.host, hub.port), error) from error
    _keep_queue_short(connection, download_bps=endpoint.download_bps)
    return WebSocketTransport(connection, throttle_of(endpoint))


def _keep_queue_short(connection: ClientConnection, *, download_bps: float) -> None:
    """Limit the kernel's buffers to what can be sent or received soon; see `UNSENT_BYTES`."""
    raw = connection.transport.get_extra_info("socket")
    if raw is None:
        return
    with contextlib.suppress(OSError):
        if UNSENT_OPTION is not None:
            raw.setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT_BYTES)
        if download_bps:
            held = min(MAX_HELD_BYTES, max(UNSENT_BYTES, round(download_bps / 8 * HELD_S)))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, held)


def _answer(error: WebSocketException) -> str:
    if isinstance(error, InvalidStatus):
        return f"HTTP status {error.response.status_code}"
    return str(error)


def _lost(error: ConnectionClosed) -> ConnectionLost:
    close = error.rcvd
    if close is None:
        return ConnectionLost("the connection to the hub broke", code=ABNORMAL)
    return ConnectionLost(
        "the hub closed the connection",
        given=f"code {close.code} {close.reason}".rstrip(),
        code=close.code,
        reason=close.reason,
    )
