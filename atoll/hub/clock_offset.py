"""How far a machine's clock is off, from the times in its heartbeats; constant memory."""

from __future__ import annotations

WINDOW_S = 30.0
"""A heartbeat that was held up for less than this disturbs nothing."""


class ClockOffset:
    """The smallest delay of the newest heartbeats tells most of the clock.

    What is seen is the sender's clock minus the delay of the message, so the largest value of some
    time is the nearest to the truth. Two windows are kept, so that an old value fades.
    """

    __slots__ = ("_before", "_began", "_best")

    def __init__(self) -> None:
        """Know nothing."""
        self._best: float | None = None
        self._before: float | None = None
        self._began = 0.0

    def note(self, theirs: float, heard: float) -> None:
        """Take a heartbeat in.

        Args:
            theirs: The sender's wall clock when it was sent; 0: not told.
            heard: The hub's monotonic time when it came.
        """
        if not 0.0 < theirs < 1e12:
            return
        if heard - self._began >= WINDOW_S:
            self._before, self._best, self._began = self._best, None, heard
        seen = theirs - heard
        self._best = seen if self._best is None else max(self._best, seen)

    def skew_s(self, *, wall: float, monotonic: float, latency_s: float = 0.0) -> float | None:
        """Return the sender's clock minus the hub's; None: it was never told.

        Args:
            wall: The hub's wall clock now.
            monotonic: Its monotonic clock at the same moment.
            latency_s: A one-way delay that is known, added again.
        """
        seen = [value for value in (self._best, self._before) if value is not None]
        return max(seen) - (wall - monotonic) + latency_s if seen else None
