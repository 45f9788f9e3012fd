"""A loss over a whole run in bounded memory: when there are too many points, neighbours merge."""

from __future__ import annotations

MAX_POINTS = 240


class LossCurve:
    """Points of (time, loss); each stands for the same number of rounds, the last for fewer."""

    def __init__(self) -> None:
        """Start empty."""
        self.points: list[tuple[float, float]] = []
        self._width = 1
        self._open: list[tuple[float, float]] = []

    def add(self, time: float, loss: float) -> None:
        """Count the loss of one round."""
        self._open.append((time, loss))
        if len(self._open) < self._width:
            return
        self.points.append(_mean(self._open))
        self._open = []
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean([a, b]) for a, b in pairs]
            self._width *= 2


def _mean(points: list[tuple[float, float]]) -> tuple[float, float]:
    return points[-1][0], sum(loss for _, loss in points) / len(points)
