"""The inner loop: take batches, do optimizer steps, run rounds, and account for the time."""

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
"""Reason for the end when only this member was asked to stop; it is between two rounds."""


@dataclass(slots=True)
class Loop:
    """Train one member from its task's current step to the last.

    `inner` computes a step (forward, backward, optimizer) and passes it to `outer`, the strategy
    that decides when members exchange their updates. Such an exchange is a round; its result is a
    :class:`~atoll.strategies.base.SyncResult`.
    """

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
    """Called after every committed round; the flag: this is the last. Counts its own seconds."""
    should_stop: Callable[[], bool] = field(default=lambda: False)
    recover: Callable[[LeftBehind], None] | None = None
    """Takes over the committed state after the group continued without this member."""
    _meter: Meter = field(default_factory=Meter, init=False)
    _mark: float = field(default=0.0, init=False)
    _reported: float = field(default=0.0, init=False)
    _bytes_before: tuple[float, float] = field(default=(0.0, 0.0), init=False)

    def run(self) -> str:
        """Train; return why the run ended early, or an empty text after the last step.

        Raises:
            LossNotFinite: the loss or a gradient is not finite; nothing was updated.
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
                # The last period may be shorter than the others: it gets a round of its own. The
                # lock keeps other threads from reading the state while that round changes it.
                with self.task.state_lock.moving():
                    last = extend_history_hash(self.task, self.outer.finish(self.task))
            except GroupLeft:
                return LEFT
            except LeftBehind as error:
                # The group has rounds that this member lacks: recover them, then do the steps left.
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
        """Do the remaining steps; return why they ended early, or an empty text."""
        while self.task.step < self.steps:
            if self.should_stop():
                return LEFT
            done = self.inner.step(self.task, next(self.stream), self.outer)
            self._meter.add(done.tokens, loss=done.loss, norm=done.grad_norm)
            self._count(done.sync)
            # `sync` is set only on the steps that ended with a committed round.
            if done.sync is not None:
                # All members see the same round, so they stop together and their weights are equal.
                stopping = done.sync.ends(self.group)
                self._round(done.sync, last=stopping)
                if stopping:
                    return "the job was asked to stop"
            if self.totals.wall_s - self._reported >= REPORT_EVERY_S:
                self._report()
        return ""

    def _catch_up(self, error: LeftBehind) -> None:
        """Take over the committed state; the steps since the last round are lost."""
        if self.recover is None:
            raise error
        self._count(None)
        self.totals.wasted_steps += self.task.period.done
        self.recover(error)
        # Not through `_count`: this time is recovery, not computing.
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
        """Record a round, then evaluate and save if they are due."""
        totals = self.totals
        # The group counts from the start of this process; a resumed run continues its totals.
        totals.sent_bytes = self._bytes_before[0] + self.group.sent_bytes
        totals.received_bytes = self._bytes_before[1] + self.group.received_bytes
        if self.totals.wall_s - self._reported >= REPORT_EVERY_S or last:
            self._report(round_values(sync))
        evaluation_s = totals.evaluation_s
        self.after_round(sync, last or self.task.step >= self.steps)
        now = self.clock.monotonic()
        # Training time includes saving but not evaluation.
        totals.wall_s += now - self._mark - (totals.evaluation_s - evaluation_s)
        self._mark = now

    def _report(self, more: dict[str, float] | None = None) -> None:
        """Record one point of measurements, with `more` added."""
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
                "sent_bytes": self.group.sent_bytes,  # of this process: the hub adds them up
                "received_bytes": self.group.received_bytes,
            }
        )


def round_values(sync: SyncResult) -> dict[str, float]:
    """Return the measurements of a round as values of a point."""
    return {
        **{f"{phase}_s": seconds for phase, seconds in sync.seconds.items()},
        "round_s": sync.held_up_s,
        "round_sent_bytes": sync.sent_bytes,
        "round_received_bytes": sync.received_bytes,
        "weight": sync.weight,
        "delta_norm": sync.delta_norm,
        "contributors": len(sync.contributors),
    }
