"""Predicted and seen beside each other, and the verdict in one sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from atoll.rehearse.curve import Curve, Moment
from atoll.units import duration

ROWS = 10
CLOSE = 0.1
"""A rehearsal within this share of the prediction confirms it."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One rehearsal; times in seconds of the fleet."""

    job: str
    machines: int
    steps: int
    slower: float
    real: bool
    """Whether processes ran; otherwise it was simulated."""
    predicted: Curve
    seen: Curve
    events: tuple[tuple[float, str], ...]
    notes: tuple[str, ...]

    @property
    def finished(self) -> bool:
        """Whether the last step was reached."""
        return round(self.seen.end.steps) >= self.steps  # its end lies between two moments

    @property
    def error(self) -> float:
        """How much longer it took than predicted, as a share; inf: it did not end."""
        if not self.finished:
            return math.inf
        return self.seen.end.seconds / self.predicted.end.seconds - 1

    def rows(self) -> Iterator[tuple[float, Moment, Moment]]:
        """Yield times with what was predicted and what was seen then, evenly spaced."""
        end_s = max(self.predicted.end.seconds, self.seen.end.seconds)
        for number in range(1, ROWS + 1):
            seconds = end_s * number / ROWS
            yield seconds, self.predicted.at(seconds), self.seen.at(seconds)

    def verdict(self) -> str:
        """Return one sentence."""
        how = "seen" if self.real else "simulated"
        said = f"predicted {duration(self.predicted.end.seconds)} for {self.steps:,} steps"
        if not self.finished:
            return (
                f"{said}, {how}: only {self.seen.end.steps:,.0f} in "
                f"{duration(self.seen.end.seconds)}"
            )
        ending = "" if abs(self.error) <= CLOSE else f"; {self._why()}"
        return f"{said}, {how} {duration(self.seen.end.seconds)} ({self.error:+.0%}){ending}"

    def _why(self) -> str:
        """Say where the difference comes from, as far as rounds tell."""
        expected, found = self.predicted.end.rounds, self.seen.end.rounds
        if found < 0.9 * expected:
            return f"rounds were fewer: {found:.0f} of {expected:.0f}"
        word = "longer" if self.error > 0 else "shorter"
        return f"as many rounds, each took {word} than predicted"

    def figures(self) -> dict[str, Any]:
        """Return everything as values for JSON."""
        return {
            "job": self.job, "machines": self.machines, "steps": self.steps,
            "slower": self.slower, "real": self.real, "finished": self.finished,
            "error": None if math.isinf(self.error) else self.error, "verdict": self.verdict(),
            "rows": [
                {"seconds": seconds, "predicted": _values(one), "seen": _values(other)}
                for seconds, one, other in self.rows()
            ],
            "events": [list(event) for event in self.events], "notes": list(self.notes),
        }  # fmt: skip


def _values(moment: Moment) -> dict[str, float | None]:
    return {
        name: None if math.isnan(value) else value
        for name, value in dataclasses.asdict(moment).items()
        if name != "seconds"
    }
