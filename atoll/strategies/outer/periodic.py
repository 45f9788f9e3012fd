"""Base class of strategies that average parameters every so many steps.

A subclass decides at which step a round is due (`next_due`) and how the agreed mean updates the
common state (`update`).

The common state is one flat float32 vector: trained parameters, then floating-point buffers.
Members send the pseudo-gradient `start - now` and not the parameters: it is small and centred on
zero, so coarse codecs lose little. Every method averages buffers (running means of BatchNorm)
plainly, as extrapolating a variance could make it negative. The inner optimizer's state stays
local.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group, Reduced
from atoll.group.run_round import CommittedRound
from atoll.strategies.base import Committed, SyncResult, Traffic
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.base import OuterDefaults, as_carrier
from atoll.strategies.rounds.initial_sync import DIGEST_ELEMENTS, broadcast_start
from atoll.strategies.rounds.interval import Interval
from atoll.strategies.rounds.round_client import RoundClient, restore_mean
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.exact_math import EXACT, FEDNOVA, evened, mean_steps
from atoll.strategies.vectors.flat import Flat, digest, length, pseudo_gradient
from atoll.task import Task
from atoll.wire.messages import RoundPlan

WEIGHTS = ("tokens", "equal")
"""Members weigh by the tokens trained since the last round, or equally."""

KEY = "delta"
"""Key of the codec's residual."""


class WeightRule:
    """The weight of a member's contribution: what it trained since the last round."""

    def __init__(self, kind: str, *, among: Sequence[str] = WEIGHTS) -> None:
        """Weigh by `kind`, one of `among`.

        Raises:
            ConfigError: `kind` is not in `among`.
        """
        if kind not in among:
            raise ConfigError(
                "unknown weight", given=repr(kind), expected=f"one of {', '.join(among)}"
            )
        self.kind = kind
        self.step = 0
        self.tokens = 0

    def weight(self, task: Task) -> float:
        """Return the current weight; steps replace tokens where tokens are not counted."""
        steps = task.step - self.step
        if self.kind in ("equal", FEDNOVA):
            return float(steps > 0)
        return float(max(task.tokens - self.tokens, 0) or steps)

    def steps(self, task: Task) -> int:
        """Return the optimizer steps since the last round.

        The period counts this member's own; if it began elsewhere, the schedule's steps stand in.
        """
        period = task.period
        return period.done if period.start == self.step else task.step - self.step

    def reset(self, task: Task) -> None:
        """Start counting from the current step, after a committed round."""
        self.step, self.tokens = task.step, task.tokens

    def state(self) -> Tensor:
        """Return the counters."""
        return torch.tensor([self.step, self.tokens])

    def load(self, state: Tensor) -> None:
        """Restore the counters."""
        self.step, self.tokens = (int(value) for value in state.tolist())


class PeriodicOuter(OuterDefaults, ABC):
    """Run a round every so many steps; see the module's docstring."""

    goes_on = True

    def __init__(self, *, weight: str, clock: Clock | None = None) -> None:
        """Weigh contributions by `tokens`, `equal` or `fednova`."""
        self._weigher = WeightRule(weight, among=(*WEIGHTS, FEDNOVA))
        self._clock: Clock = clock if clock is not None else RealClock()
        self._next = 0
        self._interval = Interval()
        self._base = "start"
        self._resumed = False
        """Whether the last loaded state was this member's own, not a donor's."""

    # ---------------------------------------------------------- decided by a subclass

    @abstractmethod
    def next_due(self, step: int) -> int:
        """Return the first step after `step` at which a round is due."""

    @abstractmethod
    def update(self, start: Tensor, mean: Tensor, *, step: int) -> None:
        """Update the parameters `start` in place with the members' mean; may overwrite `mean`."""

    @abstractmethod
    def is_plain(self, step: int) -> bool:
        """Return whether the round at `step` only averages."""

    def is_regular(self, step: int) -> bool:
        """Return whether from this step on only the interval decides when rounds are due.

        Where that is so the hub may change the interval; by default it may not.
        """
        return False

    def prepare(self, delta: Tensor) -> None:
        """Change this member's pseudo-gradient in place before it is sent; not by default."""

    def weight_in(self, plan: RoundPlan, weight: float, *, last: bool) -> float:
        """Return this member's weight in a planned round; by default `weight`."""
        return weight

    def exchange_beside(self, task: Task, found: Reduced, weight: float) -> Reduced:
        """Exchange more in the same round; return `found` with its bytes and digest added.

        May be called again after an aborted attempt, so it changes no state that outlasts one.
        """
        return found

    def takes_over(self, plan: RoundPlan, *, last: bool) -> bool:
        """Return whether this member loads the new common state; by default it does."""
        return True

    # ----------------------------------------------------------------------- training

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common state."""
        self._round_client, self._codec = RoundClient(group, self._clock, codec=codec), codec
        self._flat = Flat.of(task)
        codec.set_shapes(self._flat.shapes)
        self._num_parameters, self._num_trained = task.num_parameters, len(task.parameters())
        self._start = self._flat.read()
        self._scratch = self._flat.scratch()
        self._weigher.reset(task)
        self._plan(task)

    def rejoin(self, task: Task) -> None:
        """Load the common state into the model and restart the counters."""
        if self.one_model or not self._resumed:
            self._flat.write(self._start)
        self._resumed = False
        self._weigher.reset(task)
        self._round_client.restart()
        self._plan(task)

    def begin_now(self) -> None:
        """Count the seconds of the period from now; see :meth:`RoundClient.begin_now`."""
        self._round_client.begin_now()

    def _plan(self, task: Task) -> None:
        """Start the period until the next round."""
        self._next = self._interval.due_after(task.step, self.next_due)
        # In the first `shared_steps` all members train on the same data and send nothing.
        task.begin_period(self._next, together=self._next <= self.shared_steps)

    def begin(self, task: Task) -> SyncResult | None:
        """Let all members start from the parameters of the first one."""
        result = self._same_start(task)
        self._plan(task)
        return result

    def sync(self, task: Task) -> SyncResult | None:
        """Run a round if one is due."""
        if task.step < self._next:
            self._round_client.announce(task, base=self._base)
            return None
        shared = task.step == self.shared_steps
        result = self._same_start(task) if shared else self._round(task)
        self._plan(task)
        return result

    def finish(self, task: Task) -> SyncResult | None:
        """Run a last round if there were steps since the last one."""
        if task.step > self._weigher.step:
            result = self._round(task, last=True)
            self._plan(task)  # training may go on
            return result
        if not self.one_model:
            self._flat.write(self._start)
        return None

    def digest(self, task: Task) -> str:
        """Return the digest of the current parameters and buffers, or of the common state."""
        return digest(self._flat.read(self._scratch)) if self.one_model else self._base

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Load the common state into the model for the block; see :meth:`Outer.evaluating`."""
        if self.one_model and task.step == self._weigher.step:
            return nullcontext()  # it is there already
        return as_carrier(self._flat, self._start)

    def contribution(self, task: Task) -> tuple[Tensor, float, float]:
        """Return what this member contributes after its steps: pseudo-gradient, weight and norm.

        The norm is that before `prepare`; the pseudo-gradient is in memory that the next call uses.

        Raises:
            LossNotFinite: the parameters are not finite.
        """
        delta = pseudo_gradient(self._start, self._flat.read(self._scratch), out=self._scratch)
        # A NaN in one contribution would destroy the mean of all members: refuse it before sending.
        norm = finite_length(delta, task)
        self.prepare(delta)
        return delta, self._weigher.weight(task), norm

    def begin_at(self, task: Task, start: Tensor) -> None:
        """Take `start` as the common state, and count tokens and steps from now."""
        self._start.copy_(start)
        self._settle(task)

    def _round(self, task: Task, *, last: bool = False) -> SyncResult:
        """Run one round: the pseudo-gradient, join, reduce, commit, and the outer step."""
        entered = self._clock.monotonic()
        delta, weight, norm = self.contribution(task)
        if task.witness is not None:
            task.witness.contributed(delta)
        number, prepare_s = task.round, self._clock.monotonic() - entered

        def reduce(plan: RoundPlan) -> Reduced:
            # After an abort this is called again with another plan, and with the same delta: the
            # steps of this period are in it, and nothing of it has been applied.
            own = self.weight_in(plan, weight, last=last)
            if self._weigher.kind == FEDNOVA:
                found = self._exchange_evened(task, delta, own)
            else:
                group = self._round_client.group
                work = group.reduce([delta], codec=self._codec, weight=own, key=KEY)
                with task.state_lock.resting():
                    found = work.wait()
            return self.exchange_beside(task, found, own)

        committed = self._round_client.run(task, reduce, base=self._base, norm=norm)

        # The verdict is durable and all members hold the same bytes: from here on each computes the
        # same common state, so nothing may depend on this member alone.
        committed = restore_mean(committed, codec=self._codec, key=KEY)
        began, mean = self._clock.monotonic(), committed.reduced.tensors[0]
        delta_norm = float(mean.norm())
        self._apply(task, mean, alone=committed.plan.route == "alone")
        if self.takes_over(committed.plan, last=last):
            self._flat.write(self._start)
        self._settle(task)
        if self.is_regular(task.step):
            self._interval.follow(committed.verdict, step=task.step)
        task.round = number + 1
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        seconds = committed.seconds | {"prepare": prepare_s, "apply": apply_s}
        return outcome(committed, number, seconds, digest=self._base, delta_norm=delta_norm)

    def _exchange_evened(self, task: Task, delta: Tensor, weight: float) -> Reduced:
        """Reduce pseudo-gradients of equally many steps; see `vectors.exact_math`."""
        group, steps = self._round_client.group, self._weigher.steps(task)
        tau, sent, received = mean_steps(
            group, steps=steps, weight=weight, resting=task.state_lock.resting()
        )
        own = evened(delta, num_parameters=self._num_parameters, steps=steps, tau=tau)
        # The scaled pseudo-gradients are comparable, so codecs and robust rules work on them too.
        work = group.reduce([own], codec=self._codec, weight=weight, key=KEY)
        with task.state_lock.resting():
            found = work.wait()
        return replace(
            found,
            sent_bytes=found.sent_bytes + sent,
            received_bytes=found.received_bytes + received,
        )

    def _apply(self, task: Task, mean: Tensor, *, alone: bool) -> None:
        """Move the common state by the mean: the outer step, and the plain mean of the buffers."""
        parameters = slice(0, self._num_parameters)
        buffers = slice(self._num_parameters, None)
        if alone and self.is_plain(task.step):
            # start - (start - now) may differ from now in the last bit; a single member must
            # train exactly as it would without Atoll.
            self._flat.read(self._start)
            return
        self.update(self._start[parameters], mean[parameters], step=task.step)
        self._start[buffers].sub_(mean[buffers])

    def _same_start(self, task: Task) -> SyncResult:
        number = task.round
        self._start, rounds = broadcast_start(task, self._flat, self._round_client, base=self._base)
        self._settle(task)
        seconds = {k: sum(one.seconds[k] for one in rounds) for k in rounds[0].seconds}
        return outcome(rounds[-1], number, seconds, digest=self._base, delta_norm=0.0)

    def _settle(self, task: Task) -> None:
        self._base = digest(self._start)
        self._weigher.reset(task)

    def committed(self, task: Task) -> Committed:
        """Return the common state; see :meth:`Outer.committed`."""
        return Committed(task.period.start, self._base, self._flat.values(self._start))

    # ------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the common state, the counters and the codec's residuals."""
        return {
            "shared.start": self._start,
            "own.counters": self._weigher.state(),
            **self._interval.state(),
            **codec_state(self._codec),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        start = state["shared.start"]
        if start.shape != self._start.shape:
            raise ConfigError(
                "this state belongs to another model",
                given=f"{start.numel()} elements",
                expected=f"{self._start.numel()}",
            )
        self._start.copy_(start)
        self._resumed = "own.counters" in state
        if self._resumed:  # a donor's counters do not apply to this member
            self._weigher.load(state["own.counters"])
        load_codec_state(self._codec, state)
        self._base = digest(self._start)
        self._interval.load(state)
        self._next = self._interval.due_after(self._weigher.step, self.next_due)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        marks, rounds, step = 1, 0, 0
        while step < steps:
            step = min(self.next_due(step), steps)
            marks += step == self.shared_steps
            rounds += step != self.shared_steps
        beside = rounds if self._weigher.kind == FEDNOVA else 0
        each = volume(self._codec, elements, peers, rank=rank)
        about_steps = volume(make_codec(EXACT), 1, peers, rank=rank)
        return total(
            [
                times(start_volume(peers, rank=rank), marks),
                times(each, rounds),
                replace(times(about_steps, beside), rounds=0),
            ]
        )


def finite_length(delta: Tensor, task: Task, *, step: int | None = None) -> float:
    """Return the Euclidean norm of a contribution, made at a step; None: the task's own.

    Raises:
        LossNotFinite: the norm is NaN or infinite.
    """
    norm = length(delta)
    if not math.isfinite(norm):
        raise LossNotFinite(
            "the parameters are not finite; they were not averaged",
            given=f"member {task.member}, step {task.step if step is None else step}",
            expected="finite parameters",
            remedy="lower the learning rate, or clip the gradients",
        )
    return norm


def start_volume(peers: int, *, rank: int) -> Traffic:
    """Return the traffic of comparing the members' initial parameters."""
    return volume(make_codec("fp32"), DIGEST_ELEMENTS, peers, rank=rank)


def outcome(
    committed: CommittedRound[Any], number: int, seconds: Mapping[str, float], *, digest: str,
    delta_norm: float,
) -> SyncResult:  # fmt: skip
    """Return the :class:`SyncResult` of a committed round."""
    return SyncResult(
        round=number, contributors=committed.reduced.contributors,
        weight=committed.reduced.weight, seconds=seconds, sent_bytes=committed.sent_bytes,
        received_bytes=committed.received_bytes, delta_norm=delta_norm, digest=digest,
        aborted=committed.attempts - 1,
    )  # fmt: skip
