"""A run as a curve: after so many seconds so many steps, rounds and bytes, and this loss."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The state of a run at one time, counted from its first step."""

    seconds: float
    steps: float = 0.0
    """Of the member that is furthest."""
    rounds: float = 0.0
    sent_bytes: float = 0.0
    """Tensors sent by all members together."""
    loss: float = math.nan
    """Training loss, mean of the members; nan: not known."""


START = Moment(seconds=0.0)


@dataclass(frozen=True)
class Curve:
    """Moments in the order of time; the first is the start."""

    moments: tuple[Moment, ...] = (START,)

    @property
    def end(self) -> Moment:
        """The last moment."""
        return self.moments[-1]

    def at(self, seconds: float) -> Moment:
        """Return the state at a time, between two moments in proportion; after the end, the end."""
        place = bisect.bisect_left(self.moments, seconds, key=lambda moment: moment.seconds)
        if place == 0 or place == len(self.moments):
            return self.moments[min(place, len(self.moments) - 1)]
        return _between(self.moments[place - 1], self.moments[place], seconds, "seconds")

    def when(self, steps: float) -> float:
        """Return after how many seconds so many steps are done; inf: they are not."""
        place = bisect.bisect_left(self.moments, steps, key=lambda moment: moment.steps)
        if place == 0:
            return self.moments[0].seconds
        if place == len(self.moments):
            return math.inf
        return _between(self.moments[place - 1], self.moments[place], steps, "steps").seconds

    def until(self, steps: float) -> Curve:
        """Return the curve up to a number of steps."""
        end_s = self.when(steps)
        if math.isinf(end_s):
            return self
        kept = [moment for moment in self.moments if moment.seconds < end_s]
        return Curve((*kept, self.at(end_s)))

    def scaled(self, factor: float) -> Curve:
        """Return the curve with all times multiplied."""
        return Curve(
            tuple(
                Moment(
                    seconds=m.seconds * factor, steps=m.steps, rounds=m.rounds,
                    sent_bytes=m.sent_bytes, loss=m.loss,
                )
                for m in self.moments
            )
        )  # fmt: skip


def _between(before: Moment, after: Moment, value: float, name: str) -> Moment:
    low, high = getattr(before, name), getattr(after, name)
    share = (value - low) / (high - low) if high > low else 1.0
    mixed = {
        field: (1 - share) * getattr(before, field) + share * getattr(after, field)
        for field in ("seconds", "steps", "rounds", "sent_bytes")
    }
    return Moment(**mixed, loss=after.loss if math.isnan(before.loss) else before.loss)


def median(values: Sequence[float]) -> float:
    """Return the median; nan of none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan
