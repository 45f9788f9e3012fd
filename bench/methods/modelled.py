"""Wall time on links of a given rate, from bytes, rounds and overlap.

    round     = round trip + (bytes sent + bytes received) / rate
    visible   = max(0, round - overlapped steps x step)
    wall time = steps x step + sum of visible

The relay adds up what it has received before it answers, so the two directions do not overlap. Its
own link is taken to bear all members. Overlapped steps are those that a method computes while a
round is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

RATES_BPS = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The machine and the delay that are modelled."""

    step_s: float = 0.030
    """Seconds that a member computes per step; measured alone on one core, see docs."""
    round_trip_s: float = 0.080
    """Delay of a round, both ways together."""

    def wall_s(
        self, exchanges: Iterable[Sequence[int]], *, steps: int, rate_bps: float, overlap: int = 0
    ) -> float:
        """Return the seconds of a run whose rounds are (sent, received, how many)."""
        visible = sum(
            count * max(0.0, self._round_s(sent + received, rate_bps) - overlap * self.step_s)
            for sent, received, count in exchanges
        )
        return steps * self.step_s + visible

    def _round_s(self, nbytes: int, rate_bps: float) -> float:
        return self.round_trip_s + 8 * nbytes / rate_bps
