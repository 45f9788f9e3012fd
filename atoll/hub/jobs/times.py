"""How long a job has trained and how long it has lasted: the one definition of both.

Training is the time in which the job ran and was not paused, over all its resumptions. The wall
clock goes from its first start to its end, or to now: waiting, pauses and stops are in it.
"""

from __future__ import annotations

from atoll.hub.jobs.record import Job
from atoll.wire.states import JobState

TIMES = ("trains_since", "trained_s")
"""Fields that `note_time` changes."""


def note_time(job: Job, now: float) -> None:
    """Begin or end a span of training after a change of a job's state or pause."""
    trains = job.state == JobState.RUNNING and not job.paused
    if trains and job.trains_since is None:
        job.trains_since = now
    elif not trains and job.trains_since is not None:
        job.trained_s += max(0.0, now - job.trains_since)
        job.trains_since = None


def training_s(job: Job, now: float) -> float | None:
    """Return the seconds of training; None: it has not started."""
    if job.started is None:
        return None
    return job.trained_s + (0.0 if job.trains_since is None else max(0.0, now - job.trains_since))


def wall_s(job: Job, now: float) -> float | None:
    """Return the seconds from the first start to the end or to now; None: it has not started."""
    if job.started is None:
        return None
    return max(0.0, (now if job.ended is None else job.ended) - job.started)
