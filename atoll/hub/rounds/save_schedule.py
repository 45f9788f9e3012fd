"""When the members of a script get requests to save the committed state: by time.

The number of rounds of a script is unknown, so its checkpoints cannot be a share of them. Only the
hub can choose by time, since a checkpoint needs the parts of all members of one round: the plan of
that round asks each of them.
"""

from __future__ import annotations

FIRST_S = 60.0
"""The first checkpoint is requested this soon, if the interval is longer."""

REST = 9.0
"""Least pause after a checkpoint, in multiples of the time it took: uploads then take at most a
tenth of the time, also where links are slow."""

LONGEST_S = 3600.0
"""Longest interval while checkpoints are not completed, e.g. while an upload takes longer."""


class SaveSchedule:
    """The schedule of one job; all times are monotonic, in seconds.

    Args:
        every_s: Interval; 0: members never receive a request.
        now: When the job was opened.
    """

    def __init__(self, every_s: float, *, now: float) -> None:
        self._every_s = self._gap_s = every_s
        self._next = now + min(every_s, FIRST_S)
        self._requested_at: float | None = None
        """When the open checkpoint was requested; None: none is open."""

    def due(self, now: float) -> bool:
        """Return whether the plan of the next round asks for a checkpoint."""
        return self._every_s > 0 and now >= self._next

    def requested(self, now: float) -> None:
        """Record that a round that asked for a checkpoint was committed."""
        if self._requested_at is None:
            self._gap_s = self._every_s
        else:  # the one before is not complete: members may still be uploading it
            self._gap_s = max(self._every_s, min(2 * self._gap_s, LONGEST_S))
        self._requested_at, self._next = now, now + self._gap_s

    def completed(self, now: float) -> None:
        """Record that a checkpoint is complete."""
        if self._requested_at is not None:
            took_s = now - self._requested_at
            self._next = max(self._requested_at + self._every_s, now + REST * took_s)
            self._requested_at = None
