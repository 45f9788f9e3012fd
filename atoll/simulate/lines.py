"""Lines that transfers share: bytes pass one after the other, at the line's rate."""

from __future__ import annotations

import math


class SharedLine:
    """A line, or a processor, that is used by turns.

    Turns in order of begin carry the same bytes per second as fair shares do, and the last of many
    equal transfers ends at the same moment; the first ones end earlier than they would.
    """

    __slots__ = ("busy_s", "free_at", "nbytes", "per_s")

    def __init__(self, per_s: float) -> None:
        """Carry so many bytes per second; 0: any number."""
        self.per_s = per_s or math.inf
        self.free_at = 0.0
        self.nbytes = 0.0
        self.busy_s = 0.0

    def take(self, now: float, nbytes: float) -> float:
        """Return when a transfer that could begin now is over."""
        if math.isinf(self.per_s):
            self.nbytes += nbytes
            return now
        begin = max(now, self.free_at)
        seconds = nbytes / self.per_s
        self.nbytes += nbytes
        self.busy_s += seconds
        self.free_at = begin + seconds
        return self.free_at
