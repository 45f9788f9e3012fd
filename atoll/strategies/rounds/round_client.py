"""One member's rounds, from a strategy's exchange to the verdict's effect on the task.

A strategy calls :meth:`RoundClient.run` with an exchange, which joins, reduces and commits
(:func:`atoll.group.run_round.run_round`). This class also reports the member's speed and its
position in the data, and applies the pace and the data lease that the verdict assigns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec
from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.codec.wrappers.auto import auto_inside
from atoll.group.base import Decidable, Group, Reduced, Work, flatten, unflatten
from atoll.group.period import PeriodReport
from atoll.group.run_round import (
    CommittedMean,
    CommittedRound,
    Exchange,
    mean_exchange,
    run_round,
)
from atoll.strategies.codec_selection import CodecSelection
from atoll.task import Task
from atoll.wire.messages import Lease, MemberStats

T = TypeVar("T", bound=Decidable)

LEAST_TRIP_S = 0.005
"""A shorter round trip to the hub is not worth a thread."""
LONGEST_STEP_S = 1.0
"""With longer steps the round trip to the hub is negligible."""

PHASES = {"wait": "join", "send": "reduce", "vote": "commit"}
"""Names of a round's phases in the statistics, and in :class:`CommittedRound`."""


class RoundClient:
    """Runs the rounds of one member; measures the periods in between."""

    def __init__(self, group: Group, clock: Clock, *, codec: Codec | None = None) -> None:
        """Start the first period; `codec` may be an `auto` codec, which adapts to the link."""
        self.group, self._clock = group, clock
        auto = auto_inside(codec) if codec is not None else None
        self._selection = CodecSelection(group, auto, clock=clock) if auto is not None else None
        self._period_began = clock.monotonic()
        self._phases: dict[str, float] = {}
        """Seconds of the last round's phases, for the next report."""
        self._sent_bytes: float | None = None
        """In the last round, for the next report."""
        self._trip_s = math.inf
        """Shortest wait for a verdict so far, an upper bound of the round trip to the hub."""

    # ------------------------------------------------------------------------ a round

    def run(
        self, task: Task, exchange: Exchange[T], *, base: str, norm: float | None = None
    ) -> CommittedRound[T]:
        """Join, reduce and commit; return the committed round.

        Other threads may read the task's state during waits. The task's round is not advanced: that
        is part of applying the result.

        Args:
            task: The training.
            exchange: Computes the result with the members of a plan.
            base: Digest of the committed state that this member holds.
            norm: Of the contribution, as a measure of this member's progress.
        """
        report = self.report(task, base=base, norm=norm)
        resting = task.state_lock.resting
        committed = run_round(self.group, self._measured(exchange), report, resting=resting)
        self.apply_verdict(task, committed)
        return committed

    def start(
        self,
        exchange: Exchange[T],
        report: PeriodReport,
        *,
        prepare: Callable[[], float] | None = None,
    ) -> Work[CommittedRound[T]]:
        """Start a round on a background thread.

        The group MUST NOT be used for anything else until it has ended, and the inputs of
        `exchange` MUST NOT change. The caller applies the result and calls :meth:`apply_verdict`
        with `ahead=True`. `prepare` runs on that thread before the member joins, e.g. to copy its
        contribution from a device, and returns the contribution's norm for the report.
        """
        measured = self._measured(exchange)

        def work() -> CommittedRound[T]:
            known = report if prepare is None else _with_norm(report, prepare())
            return run_round(self.group, measured, known)

        return Work.start(work, name=f"round-{self.group.me}")

    def mean_of(
        self, task: Task, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str
    ) -> Exchange[Reduced]:
        """Return the exchange of one weighted mean of `xs`; see :meth:`Group.reduce`."""
        return mean_exchange(
            self.group, xs, codec=codec, weight=weight, key=key, resting=task.state_lock.resting
        )

    def _measured(self, exchange: Exchange[T]) -> Exchange[T]:
        """Return the exchange with the measurements that an `auto` codec needs."""
        selection = self._selection
        return exchange if selection is None else lambda plan: selection.around(exchange, plan)

    # ------------------------------------------------------------------------- report

    def announce(self, task: Task, *, base: str) -> None:
        """Ask for the next round's plan early enough that it is there when the period ends.

        Called after each step. Steps have to be short, because the others may wait for this member
        meanwhile. The position in the data has to be known in advance: it counts with the
        contribution even if this member is lost before its vote.
        """
        period = task.period
        left = period.planned - period.done
        known = LEAST_TRIP_S < self._trip_s < math.inf
        if left <= 0 or not period.done or not known or task.witness is not None:
            return
        step_s = (self._clock.monotonic() - self._period_began) / period.done
        if step_s >= LONGEST_STEP_S or left * step_s >= self._trip_s + step_s:
            return
        place = task.stretch.place_after(left) if task.stretch is not None else None
        if place is not None or task.stretch is None:
            stats = self._stats(norm=None, loss=None)
            self.group.announce(self._report_of(task, base=base, place=place, stats=stats))

    def report(self, task: Task, *, base: str, norm: float | None = None) -> PeriodReport:
        """Return the report of the period since the last round; resets the task's losses."""
        place = task.stretch.place() if task.stretch is not None else None
        stats = self._stats(norm=norm, loss=task.losses.take())
        return self._report_of(task, base=base, place=place, stats=stats)

    def _report_of(
        self, task: Task, *, base: str, place: tuple[int, dict[str, int]] | None, stats: MemberStats
    ) -> PeriodReport:
        return PeriodReport(
            round=task.round,
            base=task.labelled(base),
            tokens=task.tokens,
            steps=task.period.done,
            busy_s=self._clock.monotonic() - self._period_began,
            lease=Lease(*place) if place is not None else None,
            stats=stats,
            group=task.group,
            commitment=task.witness.commitment() if task.witness is not None else None,
        )

    def renew(self, report: PeriodReport, task: Task, *, base: str) -> PeriodReport:
        """Return a report for the round after the one for which it was made."""
        before = report.stats or MemberStats()
        stats = self._stats(norm=before.update_norm, loss=before.loss)
        return replace(report, round=task.round, base=task.labelled(base), stats=stats)

    def _stats(self, *, norm: float | None, loss: float | None) -> MemberStats:
        return MemberStats(
            phases=self._phases, update_norm=norm, loss=loss, sent_bytes=self._sent_bytes
        )

    # ------------------------------------------------------------------------ verdict

    def apply_verdict(
        self, task: Task, committed: CommittedRound[T], *, ahead: bool = False
    ) -> None:
        """Apply the pace and the data lease that a verdict assigns to this member.

        `ahead`: training continued during the round.
        """
        self._period_began = self._clock.monotonic()
        if self._selection is not None:
            self._selection.committed(committed.verdict)
        self._phases = {name: committed.seconds[phase] for name, phase in PHASES.items()}
        if committed.attempts == 1 and not ahead:
            self._trip_s = min(self._trip_s, committed.seconds["commit"])
        self._sent_bytes = float(committed.sent_bytes)
        if self.group.upload_s is not None:
            self._phases["upload"] = self.group.upload_s
        verdict, me = committed.verdict, self.group.me
        task.pace = verdict.pace.get(me, 1.0) if task.paced else 1.0
        task.leased = len(verdict.leases)
        for assigned in verdict.leases.values():
            task.leases[assigned.slot] = dict(assigned.cursor)
        lease = verdict.leases.get(me)
        if lease is None or task.stretch is None:
            return
        place = task.stretch.place()
        if ahead and place is not None and place[0] == lease.slot:
            # Within its own slot this member has already read past the committed position.
            return
        task.stretch.move(lease.slot, lease.cursor)

    def note_applied(self, seconds: float) -> None:
        """Record the duration of applying the last round's result, for the next report."""
        self._phases["apply"] = seconds

    def restart(self) -> None:
        """Restart the period, because this member recovered the state from others."""
        self._phases, self._sent_bytes = {}, None
        self.begin_now()

    def begin_now(self) -> None:
        """Count the seconds of the period from now, to leave out time that was not its steps'."""
        self._period_began = self._clock.monotonic()


def restore_mean(committed: CommittedMean, *, codec: Codec, key: str) -> CommittedMean:
    """Return a committed mean after the codec's :meth:`Codec.restore_mean`."""
    reduced = committed.reduced
    vector = reduced.tensors[0].view(-1) if len(reduced.tensors) == 1 else flatten(reduced.tensors)
    mean = codec.restore_mean(
        vector, key=key, contributors=reduced.contributors, weight=reduced.weight,
        alone=committed.plan.route == "alone",
    )  # fmt: skip
    if mean is vector:
        return committed
    return replace(committed, reduced=replace(reduced, tensors=unflatten(mean, reduced.tensors)))


def _with_norm(report: PeriodReport, norm: float) -> PeriodReport:
    stats = msgspec.structs.replace(report.stats or MemberStats(), update_norm=norm)
    return replace(report, stats=stats)
