"""What a link sent and received, in bytes of whole frames."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LinkCounters:
    """Totals of one link since it started; headers of frames are included, WebSocket's are not."""

    sent_control_bytes: int = 0
    sent_relay_bytes: int = 0
    received_control_bytes: int = 0
    received_relay_bytes: int = 0
    reconnects: int = 0
    """How often the connection broke and came back."""

    @property
    def sent_bytes(self) -> int:
        """Control and relay frames together."""
        return self.sent_control_bytes + self.sent_relay_bytes

    @property
    def received_bytes(self) -> int:
        """Control and relay frames together."""
        return self.received_control_bytes + self.received_relay_bytes
