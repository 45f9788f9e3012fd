"""Wall time on links of a given rate, from bytes, rounds and overlap.

    round     = round trip + (bytes sent + bytes that come after them) / rate
    visible   = max(0, round - overlapped steps x step)
    wall time = steps x step + sum of visible

A mean comes down while the rest goes up, as far as its codec allows: the last of its bytes come
after those sent (:mod:`atoll.codec.layout`). Of all else, what servers answer and packets for
others, all bytes do. The hub's own link is taken to bear all members. Overlapped steps are those
that a method computes while a round is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atoll.codec.layout import last_bytes
from atoll.methods.table import PRESETS
from atoll.wire.limits import CHUNK_BYTES

RATES_BPS = {"10 Mbit/s": 10e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9}


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The machine and the delay that are modelled."""

    step_s: float = 0.030
    """Seconds that a member computes per step; measured alone on one core, see docs."""
    round_trip_s: float = 0.080
    """Delay of a round, both ways together."""

    def wall_s(
        self, exchanges: Iterable[Sequence[int]], *, steps: int, rate_bps: float, overlap: int = 0,
        codec: str = "",
    ) -> float:  # fmt: skip
        """Return the seconds of a run whose rounds are (sent, received, how many).

        `codec` is that of the means; empty: there are none. Rounds in which a member gets more than
        it sends form none either: it gets the packets of others.
        """
        visible = 0.0
        for sent, received, count in exchanges:
            late = float(received)
            if codec and received <= sent:
                late = last_bytes(codec, received, piece=CHUNK_BYTES)
            hidden_s = overlap * self.step_s
            visible += count * max(0.0, self._round_s(sent + late, rate_bps) - hidden_s)
        return steps * self.step_s + visible

    def _round_s(self, nbytes: float, rate_bps: float) -> float:
        return self.round_trip_s + 8 * nbytes / rate_bps


def codec_of_means(preset: str, codec: str) -> str:
    """Return the codec if a preset's rounds form means of all members, else nothing."""
    return codec if PRESETS[preset].page.split("/")[-2] in ("every_step", "periodic") else ""
