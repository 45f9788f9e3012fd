"""The interface of a connection (ordered, reliable, message-based), and byte counters."""

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
    """One open connection. Implementations: `websocket` and, for tests, `in_memory`."""

    @property
    def throttled(self) -> bool:
        """Whether a bandwidth limit keeps `receive` from reading what the peer has sent."""
        ...

    async def send(self, message: Buffer) -> None:
        """Send one message; wait while the peer reads slowly. Raises ConnectionLost."""
        ...

    async def receive(self) -> bytes:
        """Return the next message. Cancelling it loses nothing.

        Raises:
            ConnectionLost: the connection ended and all received messages were returned.
        """
        ...

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """End the connection within about a second. Idempotent."""
        ...


Dial = Callable[[], Awaitable[Transport]]
"""Opens a new connection; raises HubUnreachable."""


_WEIGHT = 0.3
"""Weight of the newest round trip in the average."""


@dataclass(slots=True)
class LinkCounters:
    """Totals of one link, with frame headers but without those of WebSocket."""

    sent_control_bytes: int = 0
    sent_relay_bytes: int = 0
    received_control_bytes: int = 0
    received_relay_bytes: int = 0
    reconnects: int = 0
    round_trip_s: float = 0.0
    """Smoothed round trip time of heartbeats."""

    @property
    def sent_bytes(self) -> int:
        """Control and relay frames together."""
        return self.sent_control_bytes + self.sent_relay_bytes

    @property
    def received_bytes(self) -> int:
        """Control and relay frames together."""
        return self.received_control_bytes + self.received_relay_bytes

    def measured(self, *, round_trip_s: float) -> None:
        """Add a measured round trip."""
        if self.round_trip_s:
            round_trip_s = (1 - _WEIGHT) * self.round_trip_s + _WEIGHT * round_trip_s
        self.round_trip_s = round_trip_s
