"""Deletes jobs by age; off by default."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.jobs.deletion import Deletions
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.jobs.record import Job
from atoll.hub.observability.history import DAY_S
from atoll.hub.storage.checkpoint_folders import newest_complete
from atoll.wire.states import JobState

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 600.0
"""Interval of checks of the ages of jobs."""

BY = "the hub: it is older than it is to be kept"


@dataclass(frozen=True, kw_only=True)
class RetentionRules:
    """How long ended jobs are kept, in days; None: for ever."""

    ended: float | None = None
    """Jobs that cannot be resumed."""
    resumable: float | None = None
    """Stopped or failed jobs with a complete checkpoint to resume from."""


NOTHING_GOES = RetentionRules()


def expired_jobs(
    jobs: Iterable[Job], *, keeping: RetentionRules, now: float, resumable: Callable[[Job], bool]
) -> list[Job]:
    """Return the jobs to delete.

    Args:
        jobs: All that there are.
        keeping: How long they stay.
        now: Wall time.
        resumable: Returns whether a stopped or failed job can be resumed.
    """
    found = []
    for job in jobs:
        if not job.over or job.ended is None:
            continue
        age_days = (now - job.ended) / DAY_S
        limits = [limit for limit in (keeping.ended, keeping.resumable) if limit is not None]
        if not any(age_days > limit for limit in limits):
            continue  # neither limit is reached: skip the check of its folder
        may_go_on = job.state != JobState.DONE and resumable(job)
        limit = keeping.resumable if may_go_on else keeping.ended
        if limit is not None and age_days > limit:
            found.append(job)
    return found


class Retention:
    """Called often; checks the ages of jobs at intervals."""

    def __init__(
        self, *, keeping: RetentionRules, jobs: Jobs, deletions: Deletions, clock: Clock
    ) -> None:
        self._keeping = keeping
        self._jobs = jobs
        self._deletions = deletions
        self._clock = clock
        self._look_at = 0.0

    async def tick(self) -> None:
        """Delete expired jobs, one after another."""
        now = self._clock.monotonic()
        if self._keeping == NOTHING_GOES or now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        jobs, wall = self._jobs.list(), self._clock.wall()
        due = await asyncio.to_thread(
            expired_jobs, jobs, keeping=self._keeping, now=wall, resumable=self._may_go_on
        )
        for job in due:
            try:
                await self._deletions.delete(job.job, by=BY)
            except AtollError as error:  # e.g. it was resumed just now
                logger.info("%s is kept: %s", job.job, error)

    def _may_go_on(self, job: Job) -> bool:
        """Return whether a job can be resumed; True if that is unknown."""
        try:
            folder = self._jobs.folder(job.job)
        except AtollError:
            return True
        # Policies continue from the states in their topics.
        return job.of_policies or newest_complete(folder) >= 0
