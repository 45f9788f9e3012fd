"""What a link sent and received, in bytes of whole frames."""

from __future__ import annotations

from dataclasses import dataclass

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
