"""What a connection is to the rest of this room: ordered, reliable, cut into messages.

What a link sent and received, in bytes of whole frames.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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


_WEIGHT = 0.3
"""Of the newest measurement of the round trip."""


@dataclass(slots=True)
class LinkCounters:
    """Totals of one link since it started; headers of frames are included, WebSocket's are not."""

    sent_control_bytes: int = 0
    sent_relay_bytes: int = 0
    received_control_bytes: int = 0
    received_relay_bytes: int = 0
    reconnects: int = 0
    """How often the connection broke and came back."""
    round_trip_s: float = 0.0
    """Time to the hub and back, by the answers to heartbeats, the last ones weighing most."""

    @property
    def sent_bytes(self) -> int:
        """Control and relay frames together."""
        return self.sent_control_bytes + self.sent_relay_bytes

    @property
    def received_bytes(self) -> int:
        """Control and relay frames together."""
        return self.received_control_bytes + self.received_relay_bytes

    def measured(self, *, round_trip_s: float) -> None:
        """Take in one more measurement of the way there and back."""
        if self.round_trip_s:
            round_trip_s = (1 - _WEIGHT) * self.round_trip_s + _WEIGHT * round_trip_s
        self.round_trip_s = round_trip_s
