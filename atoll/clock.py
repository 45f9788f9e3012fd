"""The only source of time: :class:`RealClock`, or a virtual one in tests and simulations."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Return seconds that never go back; deadlines are values of this."""
        ...

    def wall(self) -> float:
        """Return seconds since 1970, for people and for records."""
        ...


class RealClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()

    def wall(self) -> float:
        """Return ``time.time()``."""
        return time.time()


class VirtualClock:
    """A clock that only moves by `advance`, for tests of leases and deadlines."""

    def __init__(self, start_s: float = 1_000.0) -> None:
        """Start at ``start_s`` on both scales."""
        self._now_s = start_s

    def monotonic(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def wall(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move time forward by ``seconds``."""
        if seconds < 0:
            raise ValueError(f"time cannot go back: advance({seconds})")
        self._now_s += seconds
