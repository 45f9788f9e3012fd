"""The whole model in the first rank's main memory, as a picture of what the ranks train."""

from __future__ import annotations

from atoll.island.crew import Crew

PULL, PUSH = "pull", "push"
"""Verbs of :class:`atoll.strategies.inner.worker.Worker`."""


class Picture:
    """`Task.elsewhere` of an island's first rank; see :class:`atoll.task.Elsewhere`.

    Both ways are exact, bit for bit. From the thread that trains only.
    """

    def __init__(self, crew: Crew) -> None:
        """Take the picture for true."""
        self._crew = crew
        self._old = False

    def trained(self) -> None:
        """Take note that the ranks went on: the picture is old."""
        self._old = True

    def pull(self) -> None:
        """Bring what training has made of the model into the picture, if it did anything since."""
        if self._old:
            self._crew.call(PULL)
            self._old = False

    def push(self) -> None:
        """Put the picture into the ranks' parts."""
        self._crew.call(PUSH)
        self._old = False
