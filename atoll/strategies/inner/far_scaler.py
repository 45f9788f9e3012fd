"""The scale of the loss of a whole island, as its first rank saves it and sets it anew."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.island.crew import Crew
from atoll.strategies.inner.precision import checked_scale
from atoll.strategies.inner.worker import SCALE, Worker


class FarScaler:
    """`Task.scaler` of an island's first rank; see :class:`atoll.task.LossScale`.

    The scalers of all ranks are equal after every step: the first one's state is that of all, and
    reading it asks nobody. Setting it is a command: from the thread that trains only.
    """

    def __init__(self, crew: Crew, worker: Worker) -> None:
        """Stand for the scalers of all ranks; `worker` is this rank's part of them."""
        self._crew, self._worker = crew, worker

    def state_dict(self) -> dict[str, float]:
        """Return the scale and how long it has been good; nothing where there is no scale."""
        return self._worker.scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Let all ranks take up what `state_dict` returned.

        Raises:
            ValueError: these are no numbers that a scaler has; no rank has changed then.
        """
        if state:
            scale, good_steps = checked_scale(state)
            self._crew.call(SCALE, scale=scale, good_steps=good_steps)
