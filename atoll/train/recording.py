"""Where a member's measurements go: to the hub in the background, or into its folder alone."""

from __future__ import annotations

from collections.abc import Callable

from atoll.clock import Clock
from atoll.group.connect import Connection
from atoll.task import Task
from atoll.train.metrics import Recorder
from atoll.wire.messages import Metrics, Point


def open_recorder(
    connection: Connection | None, task: Task, *, clock: Clock, flush_timeout_s: float
) -> tuple[Recorder, Callable[[], object]]:
    """Return a recorder, and what brings its last points to the hub within `flush_timeout_s`."""
    if connection is None:
        return Recorder(task, clock=clock), lambda: None
    link = connection.link
    outbox = link.outbox(_metrics_of(link.incarnation))
    recorder = Recorder(task, clock=clock, report=outbox.add, announce=link.notify)
    return recorder, lambda: outbox.close(timeout_s=flush_timeout_s)


def _metrics_of(incarnation: str) -> Callable[[int, list[Point]], Metrics]:
    return lambda seq, points: Metrics(incarnation, seq, points)
