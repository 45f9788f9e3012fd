"""What a connection is to the rest of this room: ordered, reliable, cut into messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from atoll.errors import HubError
from atoll.wire.frames import Buffer

ABNORMAL = 1006
"""Close code of a connection that broke without a closing handshake (RFC 6455, 7.1.5)."""


class ConnectionLost(HubError):
    """The connection to the hub ended; `code` is its WebSocket close code."""

    def __init__(
        self,
        what: str,
        *,
        given: object = None,
        expected: str | None = None,
        remedy: str | None = None,
        code: int = ABNORMAL,
        reason: str = "",
    ) -> None:
        super().__init__(what, given=given, expected=expected, remedy=remedy)
        self.code = code
        self.reason = reason


class Transport(Protocol):
    """One open connection. Implementations: `websocket` (real) and `memory` (tests)."""

    async def send(self, message: Buffer) -> None:
        """Hand over one message; waits while the peer reads slowly.

        Raises:
            ConnectionLost: the connection ended.
        """
        ...

    async def receive(self) -> bytes:
        """Return the next message. Cancelling it loses nothing.

        Raises:
            ConnectionLost: the connection ended and everything received was handed out.
        """
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection within about a second. May be called again."""
        ...


Dial = Callable[[], Awaitable[Transport]]
"""Opens a fresh connection to the same place. Raises HubUnreachable."""
