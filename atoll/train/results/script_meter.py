"""Measurements of a script's own training loop: times, losses and bytes, one point a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from atoll.clock import Clock
from atoll.group.base import Group
from atoll.group.connect import Connection
from atoll.strategies.base import SyncResult
from atoll.task import Task
from atoll.train.results.loggers import Loggers
from atoll.train.results.metrics import REPORT_EVERY_S, Meter, Recorder, Totals, metrics_outbox


class ScriptMeter:
    """Measures one member of a script; it sends nothing before `open`."""

    def __init__(self, group: Group, clock: Clock, *, loggers: Loggers | None = None) -> None:
        """`loggers` get every point, too."""
        self._loggers = loggers or Loggers(())
        self.totals = Totals()
        self._group, self._clock = group, clock
        self._task: Task | None = None
        self._recorder: Recorder | None = None
        self._flush: Callable[[], object] = lambda: None
        self._meter = Meter()
        self._values: dict[str, float] = {}
        self._sent = self._received = 0.0
        """Bytes sent outside of rounds, as the loop reports them."""
        self.restart()

    def restart(self) -> None:
        """Start the time of the next step now."""
        self._mark = self._reported = self._clock.monotonic()
        if self._recorder is not None:
            self._recorder.process_began(self.totals)

    def open(self, task: Task, connection: Connection | None, *, flush_timeout_s: float) -> None:
        """Send points of `task` from now on."""
        self._task = task
        if connection is None:
            self._recorder = Recorder(task, clock=self._clock, report=self._loggers.add)
        else:
            outbox = metrics_outbox(connection.link)
            self._recorder = Recorder(
                task,
                clock=self._clock,
                report=self._loggers.before(outbox.add),
                announce=connection.link.notify,
            )
            self._flush = lambda: outbox.close(timeout_s=flush_timeout_s)
        self._recorder.point({"parameters": task.num_parameters})

    def log(
        self, *, loss: float | Tensor | None, tokens: int, values: Mapping[str, float | Tensor]
    ) -> None:
        """Count tokens and keep values until the next point."""
        value = None if loss is None else _number(loss)
        if self._task is not None:
            self._task.tokens += tokens
            self._task.losses.add(value)
        self._meter.add(tokens, loss=value)
        numbers = {name: _number(value) for name, value in values.items()}
        self._sent, self._received = (
            numbers.pop(name, before)
            for name, before in (("sent_bytes", self._sent), ("received_bytes", self._received))
        )
        self._values |= numbers

    def step(self, sync: SyncResult | None) -> None:
        """Count the time since the last step; send a point if it is due."""
        now = self._clock.monotonic()
        self.totals.count(now - self._mark, sync)
        self._mark = now
        self.bytes()
        if now - self._reported >= REPORT_EVERY_S:
            self.report()

    def bytes(self) -> None:
        """Record the bytes sent so far."""
        self.totals.sent_bytes = self._group.sent_bytes + self._sent
        self.totals.received_bytes = self._group.received_bytes + self._received

    def report(self) -> None:
        """Send the measurements since the last point."""
        if self._recorder is None or self._task is None:
            return
        now = self._clock.monotonic()
        values = self._meter.take(now - self._reported) | self._values
        self._reported, self._values = now, {}
        self._recorder.point(values | self.totals.to_dict() | {"tokens": self._task.tokens})

    def tell(self, kind: str, text: str) -> None:
        """Report an event for people."""
        if self._recorder is not None:
            self._recorder.event(kind, text)

    def close(self) -> None:
        """Send the last points."""
        self._flush()
        self._loggers.close()
        if self._recorder is not None:
            self._recorder.close()


def _number(value: float | Tensor) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
