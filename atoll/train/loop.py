"""The inner loop: batches, steps, rounds; and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from atoll.clock import Clock
from atoll.errors import GroupLeft, LeftBehind
from atoll.group.base import Group
from atoll.strategies.base import Inner, Outer, SyncResult, extend_history_hash
from atoll.task import Task
from atoll.train.results.metrics import REPORT_EVERY_S, Meter, Recorder, Totals

LEFT = "this process was asked to stop"
"""Why the loop ended when only this member was told to; it stands between two rounds."""


@dataclass(slots=True)
class Loop:
    """One member's training from where its task stands to the last step."""

    task: Task
    stream: Iterator[Any]
    inner: Inner
    outer: Outer
    group: Group
    steps: int
    recorder: Recorder
    totals: Totals
    clock: Clock
    after_round: Callable[[SyncResult, bool], None]
    """Called after every committed round, with whether the run ends here. It counts its own
    seconds in the totals."""
    should_stop: Callable[[], bool] = field(default=lambda: False)
    recover: Callable[[LeftBehind], None] | None = None
    """Takes the committed state over when the group went on without this member."""
    _meter: Meter = field(default_factory=Meter, init=False)
    _mark: float = field(default=0.0, init=False)
    _reported: float = field(default=0.0, init=False)
    _bytes_before: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def run(self) -> str:
        """Train; return why it ended early, or an empty text when all steps are done.

        Raises:
            LossNotFinite: the loss or a gradient is; nothing was updated.
            GroupError: the members cannot agree any more.
        """
        self._bytes_before = (self.totals.sent_bytes, self.totals.received_bytes)
        self._mark = self.clock.monotonic()
        self._reported = self.totals.wall_s
        while True:
            try:
                reason = self._steps()
                if reason:
                    return reason
                with self.task.gate.moving():
                    last = extend_history_hash(self.task, self.outer.finish(self.task))
            except GroupLeft:
                return LEFT
            except LeftBehind as error:
                self._catch_up(error)
                continue
            self._count(last)
            if last is not None:
                self._round(last, last=True)
                if last.more:
                    continue
            self._report()
            return ""

    def _steps(self) -> str:
        """Do the steps that are left; return why that ended early, or an empty text."""
        while self.task.step < self.steps:
            if self.should_stop():
                return LEFT
            done = self.inner.step(self.task, next(self.stream), self.outer)
            self._meter.add(done.tokens, loss=done.loss, norm=done.grad_norm)
            self._count(done.sync)
            if done.sync is not None:
                stopping = done.sync.ends(self.group)
                self._round(done.sync, last=stopping)
                if stopping:
                    return "the job was asked to stop"
            if self.totals.wall_s - self._reported >= REPORT_EVERY_S:
                self._report()
        return ""

    def _catch_up(self, error: LeftBehind) -> None:
        """Take the committed state over; what was done since the last round is dropped."""
        if self.recover is None:
            raise error
        self._count(None)
        self.totals.wasted_steps += self.task.period.done
        self.recover(error)
        now = self.clock.monotonic()
        self.totals.wall_s += now - self._mark
        self.totals.recovery_s += now - self._mark
        self._mark = now

    def _count(self, sync: SyncResult | None) -> None:
        """Add the time since the last call to the totals."""
        now = self.clock.monotonic()
        self.totals.count(now - self._mark, sync, waited_s=self.task.waited_s)
        self.task.waited_s = 0.0
        self._mark = now

    def _round(self, sync: SyncResult, *, last: bool) -> None:
        """Take note of a round, then evaluate and save if it is time."""
        totals = self.totals
        totals.sent_bytes = self._bytes_before[0] + self.group.sent_bytes
        totals.received_bytes = self._bytes_before[1] + self.group.received_bytes
        if self.totals.wall_s - self._reported >= REPORT_EVERY_S or last:
            self._report(round_values(sync))
        evaluation_s = totals.evaluation_s
        self.after_round(sync, last or self.task.step >= self.steps)
        now = self.clock.monotonic()
        totals.wall_s += now - self._mark - (totals.evaluation_s - evaluation_s)
        self._mark = now

    def _report(self, more: dict[str, float] | None = None) -> None:
        """Send a point."""
        totals = self.totals
        values = self._meter.take(totals.wall_s - self._reported) | (more or {})
        self._reported = totals.wall_s
        group = next(iter(self.task.optimizer.param_groups))
        self.recorder.point(
            {
                **values,
                "lr": group["lr"],
                "tokens": self.task.tokens,
                "wall_s": totals.wall_s,
                "compute_s": totals.compute_s,
                "sync_s": totals.sync_s,
                "wait_s": totals.wait_s,
                "send_s": totals.send_s,
                "checkpoint_s": totals.checkpoint_s,
                "recovery_s": totals.recovery_s,
                "wasted_steps": totals.wasted_steps,
                "pace": self.task.pace,
                "sent_bytes": totals.sent_bytes,
                "received_bytes": totals.received_bytes,
            }
        )


def round_values(sync: SyncResult) -> dict[str, float]:
    """Return what a round tells, as values of a point."""
    return {
        **{f"{phase}_s": seconds for phase, seconds in sync.seconds.items()},
        "round_s": sync.held_up_s,
        "round_sent_bytes": sync.sent_bytes,
        "round_received_bytes": sync.received_bytes,
        "weight": sync.weight,
        "delta_norm": sync.delta_norm,
        "contributors": len(sync.contributors),
    }
