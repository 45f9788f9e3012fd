"""A member's identity, stop requests, uploads, events and queues."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from atoll.clock import Clock, RealClock
from atoll.group.base import Group
from atoll.queues import Queue, Topic
from atoll.run.place import JobPlace, Membership
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.join_job import JoinedJob
from atoll.train.queues import open_queues
from atoll.train.results.loggers import open_loggers
from atoll.train.results.script_meter import ScriptMeter

log = logging.getLogger(__name__)


class Session(JobPlace):
    """A process that is a member of a job, with or without a hub."""

    def __init__(
        self,
        group: Group,
        membership: Membership,
        *,
        ranks: ScriptRanks,
        enrolled: JoinedJob | None,
        leave_requested: threading.Event | None,
        clock: Clock | None,
    ) -> None:
        """Join as a member of `group`."""
        super().__init__(ranks, membership)
        self.group, self._enrolled = group, enrolled
        self._connection = enrolled.connection if enrolled is not None else None
        self._clock: Clock = clock if clock is not None else RealClock()
        self._leave_requested = (
            leave_requested if leave_requested is not None else threading.Event()
        )
        loggers = open_loggers(membership.log, self.directory, job=membership.job, member=group.me)
        self._meter = ScriptMeter(group, self._clock, loggers=loggers)
        self._queues = open_queues(enrolled, member=self.member, stopping=lambda: self.stopping)

    @property
    def member(self) -> str:
        """The member's name in the job, e.g. `w0`."""
        return self.group.me

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the last round; before the first one only this member."""
        return self.group.members or (self.group.me,)

    @property
    def is_first(self) -> bool:
        """Whether this is the first member, for work that only one does, e.g. printing."""
        return self.members[0] == self.member

    @property
    def stopping(self) -> bool:
        """Whether the job, or this process, was asked to stop: leave the loop soon.

        The ranks of an island see it in the same step.
        """
        return super().stopping if self._joint else self._stop_requested

    @property
    def _replaced(self) -> bool:
        return self._enrolled is not None and self._enrolled.replaced

    @property
    def _gone(self) -> bool:
        """Whether this process is to end while the job continues."""
        return self._leave_requested.is_set() or self._replaced

    @property
    def _stop_requested(self) -> bool:
        return self._gone or self.group.stopping

    def _leave_soon(self) -> None:
        if self._leave_requested.is_set():
            return
        self._leave_requested.set()
        if self._enrolled is not None:
            self._enrolled.leave("this process was asked to leave")

    def publish(self, path: Path, name: str) -> None:
        """Upload a finished file to the hub; it is collected into `runs/JOB/`."""
        if self._connection is not None:
            self._connection.publish(path, name)

    def tell(self, kind: str, text: str) -> None:
        """Report an event to people; only after a model is tracked or wrapped."""
        self._meter.tell(kind, text)

    # ------------------------------------------------------------------------------ queues

    def queue(self, name: str, **options: Any) -> Queue:
        """Return a durable queue: each item is processed by one consumer, which acknowledges it.

        Args:
            name: Without a slash it belongs to this job; others must be listed in `queues` of
                [job].
            options: `max_items`, `max_bytes`, `overflow` (`reject`, `drop-oldest` or `wait`),
                `max_attempts`, `keep_s`; they apply to all users of the queue from then on.

        Raises:
            AuthError: this job may not use it.
            ConfigError: there is no such option.
        """
        return self._queues.queue(name, **options)

    def topic(self, name: str, **options: Any) -> Topic:
        """Return a durable topic, read by each subscription; see :meth:`queue`."""
        return self._queues.topic(name, **options)

    def _close_queues(self, *, timeout_s: float) -> None:
        """Wait for what `put_later` has not stored yet, then close all queues."""
        if not self._queues.close(timeout_s=timeout_s):
            log.warning("some items were not stored by the hub within %.0f s", timeout_s)
