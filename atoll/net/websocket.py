"""The real transport: a WebSocket to the hub's `/ws`."""

from __future__ import annotations

import contextlib
import socket

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidMessage,
    InvalidStatus,
    WebSocketException,
)

from atoll.errors import HubUnreachable
from atoll.net.transport import ABNORMAL, ConnectionLost, Transport
from atoll.net.unreachable import at, place_of, unreachable
from atoll.net.way import PLAIN, Way
from atoll.wire.frames import Buffer
from atoll.wire.limits import MAX_FRAME_BYTES, UNSENT_BYTES

CLOSE_TIMEOUT_S = 1.0
"""A dead peer answers no closing handshake: do not wait long for it."""


class WebSocketTransport:
    """A `Transport` over one WebSocket of the `websockets` library."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def send(self, message: Buffer) -> None:
        """Send one binary message; waits while more than the write limit is unsent."""
        try:
            await self._connection.send(message)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def receive(self) -> bytes:
        """Return the next message."""
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as error:
            raise _lost(error) from error

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Close; a peer that does not answer is left after `CLOSE_TIMEOUT_S`."""
        await self._connection.close(code, reason)


async def dial(url: str, *, way: Way = PLAIN, timeout_s: float = 10.0) -> Transport:
    """Open a connection to the hub at ``http(s)://HOST:PORT[/PREFIX]``.

    Raises:
        HubUnreachable: says host, port and why: refused, timed out, unknown name, not a hub.
        ConfigError: the URL has another form.
    """
    place = place_of(url)
    try:
        connection = await connect(
            place.websocket,
            ssl=way.context(secure=place.secure),
            compression=None,  # tensors do not compress, and messages are small
            proxy=way.proxy or None,
            ping_interval=None,  # heartbeats are messages of our own
            open_timeout=timeout_s,
            close_timeout=CLOSE_TIMEOUT_S,
            max_size=MAX_FRAME_BYTES,
            max_queue=16,
        )
    except (InvalidStatus, InvalidMessage, InvalidHandshake) as error:
        raise HubUnreachable(
            f"what answers at {at(place.host, place.port)} is not a hub",
            given=_answer(error),
            expected="a hub's WebSocket at /ws",
            remedy="check host and port: `atoll hub` prints them when it starts",
        ) from error
    except (OSError, TimeoutError, WebSocketException) as error:
        raise unreachable(url, error) from error
    _keep_queue_short(connection)
    return WebSocketTransport(connection)


def _keep_queue_short(connection: ClientConnection) -> None:
    """Let the kernel take no more than it can soon send.

    Otherwise it buffers megabytes on a slow line, and a heartbeat waits seconds behind tensors.
    """
    option = getattr(socket, "TCP_NOTSENT_LOWAT", None)
    raw = connection.transport.get_extra_info("socket")
    if option is not None and raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.IPPROTO_TCP, option, UNSENT_BYTES)


def _answer(error: WebSocketException) -> str:
    """Return how the stranger answered."""
    if isinstance(error, InvalidStatus):
        return f"HTTP status {error.response.status_code}"
    return str(error)


def _lost(error: ConnectionClosed) -> ConnectionLost:
    """Return our error for a closed socket, with the code that the hub gave, if it did."""
    close = error.rcvd
    if close is None:
        return ConnectionLost("the connection to the hub broke", code=ABNORMAL)
    return ConnectionLost(
        "the hub closed the connection",
        given=f"code {close.code} {close.reason}".rstrip(),
        code=close.code,
        reason=close.reason,
    )
