"""What an actor tells of itself: a point about once a second, and its part of the summary."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

LAST = 20
"""Episodes whose mean is `return`."""

RATE_S = 5.0
"""Steps per second are measured over about so long."""


class ActorMetrics:
    """Counts one actor's episodes, steps and updates."""

    def __init__(self, *, last: int = LAST) -> None:
        """Begin with nothing; `return` is the mean of the last `last` episodes."""
        self._count = last
        self.env_steps = 0
        self.updates = 0
        self.episodes = 0
        self.first: list[float] = []
        """Returns of the first episodes."""
        self.best: float | None = None
        self.dropped: dict[str, int] = {}
        """Trajectories that nobody learned from, by reason."""
        self._last: deque[float] = deque(maxlen=self._count)
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    @property
    def mean_return(self) -> float | None:
        """Mean return of the last episodes; None: none has ended."""
        return sum(self._last) / len(self._last) if self._last else None

    def lived(self, steps: int, returns: Sequence[float]) -> None:
        """Count a trajectory."""
        self.env_steps += steps
        for value in returns:
            self.episodes += 1
            self._last.append(value)
            if len(self.first) < self._count:
                self.first.append(value)
            if len(self._last) == self._count:
                mean = sum(self._last) / self._count
                self.best = mean if self.best is None else max(self.best, mean)
        now = time.monotonic()
        self._marks.append((now, self.env_steps))
        while len(self._marks) > 2 and now - self._marks[1][0] > RATE_S:
            self._marks.popleft()

    def drop(self, reason: str) -> None:
        """Count a trajectory that was not used."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def point(self) -> dict[str, float]:
        """Return what a point says of it."""
        (began, before), (now, steps) = self._marks[0], self._marks[-1]
        values = {
            "env_steps": float(self.env_steps), "episodes": float(self.episodes),
            "updates": float(self.updates), "dropped": float(sum(self.dropped.values())),
        }  # fmt: skip
        if now > began:
            values["env_steps_per_s"] = (steps - before) / (now - began)
        mean = self.mean_return
        if mean is not None:
            values["return"] = mean
            values["return_best"] = mean if self.best is None else self.best
        return values

    def result(self) -> dict[str, Any]:
        """Return what the summary says of it."""
        mean = self.mean_return
        return {
            "env_steps": self.env_steps, "episodes": self.episodes, "updates": self.updates,
            "return_first": sum(self.first) / len(self.first) if self.first else None,
            "return_last": mean, "return_best": mean if self.best is None else self.best,
            "dropped": dict(self.dropped),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Return it all, to go on with."""
        return {
            "env_steps": self.env_steps, "updates": self.updates, "episodes": self.episodes,
            "first": self.first, "best": self.best, "dropped": self.dropped,
            "last": list(self._last),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned."""
        kept = dict(state)
        self._last = deque(kept.pop("last"), maxlen=self._count)
        for name, value in kept.items():
            setattr(self, name, value)
        self._marks = deque([(time.monotonic(), self.env_steps)])
