"""The plan of a round that a member asks for while it computes the last steps before it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from atoll.clock import RealClock
from atoll.group.base import Work
from atoll.group.period import PeriodReport
from atoll.wire.messages import RoundJoin, RoundPlan


class AnnouncedJoin:
    """At most one join in advance. :meth:`aborted` is called on other threads."""

    def __init__(self) -> None:
        """Start without one."""
        self.report: RoundJoin | None = None
        """Report of the present round, if the plan was requested with an older one."""
        self._round = -1
        self._requested: Work[RoundPlan] | None = None
        self._lock = threading.Lock()
        self._over = -1
        """The last epoch that was aborted."""

    def ask(self, round_: int, ask: Callable[[], RoundPlan]) -> None:
        """Ask for the plan of a round on a thread, unless that was done already."""
        if self._requested is None or self._round != round_:
            self._round, self._requested = round_, Work.start(ask, name="announced")

    def forget(self) -> None:
        """Drop the request: this member recovers, and joins with another state."""
        self._requested = None

    def aborted(self, epoch: int) -> None:
        """An attempt has ended without a commit: its plan is of no use."""
        with self._lock:
            self._over = max(self._over, epoch)

    def take(self, report: PeriodReport, *, deadline: float | None = None) -> RoundPlan | None:
        """Wait for the plan of a round; None: it was not asked for, or is over.

        Raises:
            DeadlineExceeded: it did not come by the monotonic `deadline`.
            AtollError: the hub's answer was this error.
        """
        requested, self._requested, self.report = self._requested, None, None
        if requested is None or self._round != report.round:
            return None
        left_s = None if deadline is None else max(0.0, deadline - RealClock().monotonic())
        plan = requested.wait(left_s)
        with self._lock:
            if plan.epoch <= self._over:
                return None
        self.report = report.as_join()
        return plan
