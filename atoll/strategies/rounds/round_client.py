"""Holding one member's rounds: what it did in the period goes along, what comes back is obeyed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from atoll.clock import Clock
from atoll.codec.base import Codec
from atoll.codec.wrappers.auto import auto_inside
from atoll.group.base import Decidable, Group, Reduced, Resting, Work, flatten, unflatten
from atoll.group.run_round import Agreed, CommittedRound, run_round
from atoll.strategies.codec_selection import CodecSelection
from atoll.task import Task
from atoll.wire.messages import Lease, MemberStats, RoundPlan

T = TypeVar("T", bound=Decidable)

Exchange = Callable[[RoundPlan], T]
"""Reduces and swaps with the members of a plan, and returns what they came to."""


@dataclass(frozen=True, slots=True)
class PeriodReport:
    """What a member did in the period that ends with a round."""

    tokens: int
    """In all."""
    steps: int
    busy_s: float
    lease: Lease | None
    """Where its data stands."""
    loss: float | None


class RoundClient:
    """Tells the group how fast this member was and where its data stands, round by round."""

    def __init__(self, group: Group, clock: Clock, *, codec: Codec | None = None) -> None:
        """Measure the first period from now; `codec` may be one that suits itself to the link."""
        self.group, self._clock = group, clock
        auto = auto_inside(codec) if codec is not None else None
        self._choosing = CodecSelection(group, auto, clock=clock) if auto is not None else None
        self._ended = clock.monotonic()
        self._phases: dict[str, float] = {}

    def hold(
        self,
        task: Task,
        xs: Sequence[Tensor],
        *,
        codec: Codec,
        weight: float,
        base: str,
        key: str,
        norm: float | None = None,
    ) -> Agreed:
        """Return the mean that all members committed; see :func:`atoll.group.run_round.agree`.

        The state of the task may be read by others while this waits. The task's round is not
        advanced: that is part of applying the result. `norm` is that of the contribution, where
        it says how much this member has learned.
        """
        mean = mean_exchange(
            self.group, xs, codec=codec, weight=weight, key=key, resting=task.gate.resting
        )
        agreed = self.hold_with(task, mean, base=base, norm=norm)
        return restore_mean(agreed, codec=codec, key=key)

    def hold_with(
        self, task: Task, exchange: Exchange[T], *, base: str, norm: float | None = None
    ) -> CommittedRound[T]:
        """Do what :meth:`hold` does, with any exchange; see `atoll.group.run_round`."""
        told = self._told(task, base=base, norm=norm)
        measured = self._measured(exchange)
        agreed = run_round(self.group, measured, resting=task.gate.resting, **told)
        self.obey(task, agreed)
        return agreed

    def start(
        self,
        task: Task,
        exchange: Exchange[T],
        *,
        base: str,
        norm: float | None = None,
        period: PeriodReport | None = None,
    ) -> Work[CommittedRound[T]]:
        """Begin a round on a background thread, so that training goes on meanwhile.

        One at a time per group, and nothing else may use the group until it has ended. What
        `exchange` uses MUST NOT change meanwhile, and it waits without `resting`. Whoever takes
        the result calls :meth:`obey` with it, `ahead=True`. `period` is what :meth:`period` said
        when the contribution was made, where that is a while ago.
        """
        told = self._told(task, base=base, norm=norm, period=period)
        measured = self._measured(exchange)
        return Work.start(
            lambda: run_round(self.group, measured, **told), name=f"round-{self.group.me}"
        )

    def _measured(self, exchange: Exchange[T]) -> Exchange[T]:
        """Return the exchange with what a codec wants to know of the link."""
        choosing = self._choosing
        return exchange if choosing is None else lambda plan: choosing.around(exchange, plan)

    def period(self, task: Task) -> PeriodReport:
        """Return what was done since the last round; the losses are taken out of the task."""
        place = task.stretch.place() if task.stretch is not None else None
        return PeriodReport(
            tokens=task.tokens,
            steps=task.period.done,
            busy_s=self._clock.monotonic() - self._ended,
            lease=Lease(*place) if place is not None else None,
            loss=task.losses.take(),
        )

    def _told(
        self, task: Task, *, base: str, norm: float | None, period: PeriodReport | None = None
    ) -> dict[str, Any]:
        """Return what goes along with a round that begins now."""
        told = period if period is not None else self.period(task)
        return {
            "base": base,
            "round_": task.round,
            "tokens": told.tokens,
            "steps": told.steps,
            "busy_s": told.busy_s,
            "lease": told.lease,
            "account": MemberStats(phases=self._phases, update_norm=norm, loss=told.loss),
        }

    def obey(self, task: Task, agreed: CommittedRound[T], *, ahead: bool = False) -> None:
        """Do what the verdict of a round says about this member's pace and data.

        `ahead`: training went on during the round. The data then moves only to another slot: in its
        own one this member is past the place that the verdict knows.
        """
        self._ended = self._clock.monotonic()
        if self._choosing is not None:
            self._choosing.committed()
        told = {"wait": "join", "send": "reduce", "vote": "commit"}
        self._phases = {name: agreed.seconds[phase] for name, phase in told.items()}
        if self.group.upload_s is not None:
            self._phases["upload"] = self.group.upload_s
        verdict, me = agreed.verdict, self.group.me
        task.pace = verdict.pace.get(me, 1.0) if task.paced else 1.0
        for dealt in verdict.leases.values():
            task.leases[dealt.slot] = dict(dealt.cursor)
        lease = verdict.leases.get(me)
        if lease is None or task.stretch is None:
            return
        place = task.stretch.place()
        if ahead and place is not None and place[0] == lease.slot:
            return
        task.stretch.move(lease.slot, lease.cursor)

    def applied(self, seconds: float) -> None:
        """Note how long the last round's result took to take over; part of the next account."""
        self._phases["apply"] = seconds

    def restart(self) -> None:
        """Measure the period from now on: this member took the state over from others."""
        self._ended, self._phases = self._clock.monotonic(), {}


def restore_mean(agreed: Agreed, *, codec: Codec, key: str) -> Agreed:
    """Return a committed mean as what it stands for; see :meth:`Codec.restore_mean`."""
    reduced = agreed.reduced
    vector = reduced.tensors[0].view(-1) if len(reduced.tensors) == 1 else flatten(reduced.tensors)
    mean = codec.restore_mean(
        vector, key=key, contributors=reduced.contributors, weight=reduced.weight,
        alone=agreed.plan.route == "alone",
    )  # fmt: skip
    if mean is vector:
        return agreed
    return replace(agreed, reduced=replace(reduced, tensors=unflatten(mean, reduced.tensors)))


def mean_exchange(
    group: Group, xs: Sequence[Tensor], *, codec: Codec, weight: float, key: str, resting: Resting
) -> Exchange[Reduced]:
    """Return the exchange that is one weighted mean."""

    def mean(_: RoundPlan) -> Reduced:
        work = group.reduce(xs, codec=codec, weight=weight, key=key)
        with resting():
            return work.wait()

    return mean
