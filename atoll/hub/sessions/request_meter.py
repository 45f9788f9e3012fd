"""How many frames a session may send: those above are read later, not refused.

An honest process never notices; one that floods is slowed by its own connection, on which the hub
stops to read, so that the others' rounds and pages keep their time.
"""

from __future__ import annotations

from atoll.wire.messages import Event, LogLines, Message, Metrics

FRAMES_PER_S = 2_000.0
"""Frames of one session in the long run, unless the hub's quotas say otherwise. A put of many
items is one."""
REPORT_COST = 5.0
"""A log, metrics or event message counts as so many frames: each is written to the database."""
LINE_COST = 0.1
"""The same for each line of a log message."""
BYTES_PER_FRAME = 8 * 2**10
"""A control message counts as one frame more for so many bytes."""
LARGE_BYTES = 16 * 2**10
"""Relayed frames of so many bytes do not count: flow control limits them."""
BURST_S = 2.0
"""Frames of so many seconds may come at once after a quiet time."""
BURST = FRAMES_PER_S * BURST_S
LEAST_PAUSE_S, MOST_PAUSE_S = 0.02, 1.0
"""Shorter pauses are added up; longer ones would keep heartbeats waiting."""


def cost_of(body: Message, nbytes: int) -> float:
    """Return as how many frames a control message of so many bytes counts."""
    cost = 1.0 + nbytes // BYTES_PER_FRAME
    if isinstance(body, LogLines):
        return cost + REPORT_COST + LINE_COST * len(body.lines)
    return cost + REPORT_COST if isinstance(body, Metrics | Event) else cost


class RequestMeter:
    """A leaky bucket, and what it has counted."""

    __slots__ = ("_at", "_level", "frames", "limited_at", "paused_s", "rate")

    def __init__(self, rate: float = FRAMES_PER_S) -> None:
        """Let `rate` frames per second pass in the long run; 0: any number."""
        self.rate = rate
        self.frames = 0
        self.paused_s = 0.0
        """How long this session was made to wait."""
        self.limited_at = -1e9
        """When it last had to wait, in monotonic seconds."""
        self._level, self._at = 0.0, 0.0

    def took(self, now: float, cost: float = 1.0) -> float:
        """Count a frame as `cost` many; return the seconds to wait before reading the next one."""
        self.frames += 1
        if not self.rate:
            return 0.0
        self._level = max(0.0, self._level - (now - self._at) * self.rate) + cost
        self._at = now
        pause_s = self._level / self.rate - BURST_S
        if pause_s < LEAST_PAUSE_S:
            return 0.0
        self.limited_at = now
        pause_s = min(pause_s, MOST_PAUSE_S)
        self.paused_s += pause_s
        return pause_s
