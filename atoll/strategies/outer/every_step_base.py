"""Base classes of strategies with a round in every step.

A round may need several exchanges. `exchange(context, plan)` runs them in the same order on every
member, changes no state, and is called again after an aborted attempt; its result is applied after
the commit. Replicas need not be equal, so members compare a chain of the rounds' digests.
Floating-point buffers are averaged uncompressed in an exchange of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group, Reduced
from atoll.group.run_round import CommittedRound
from atoll.strategies.base import Committed, SyncResult, Traffic, any_overflowed, reported_weight
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.outer.periodic import WeightRule, outcome
from atoll.strategies.rounds.exchange import (
    ExchangeContext,
    ExchangeResult,
    Exchanging,
    hashed,
)
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.rounds.round_client import RoundClient
from atoll.strategies.traffic import total, volume
from atoll.strategies.vectors.flat import Flat, digest, length
from atoll.strategies.vectors.gradients import Gradients
from atoll.task import Task
from atoll.wire.messages import RoundPlan

V = TypeVar("V")


class EveryStepBase(OuterDefaults):
    """A round in every step; see the module's docstring."""

    def __init__(self, *, weight: str, clock: Clock | None = None) -> None:
        """Weigh contributions by `tokens` or `equal`."""
        self._weigher = WeightRule(weight)
        self._clock: Clock = clock if clock is not None else RealClock()
        self._base = "start"
        self._last: SyncResult | None = None

    # -------------------------------------------------------------------------- beginning

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare the vectors for the task's parameters and buffers."""
        self._round_client, self._codec = RoundClient(group, self._clock), codec
        self._parameters = task.parameters()
        self._flat = Flat(self._parameters, task=task)
        self._buffers = Flat(task.buffers(), task=task)
        self._whole = Flat([*self._parameters, *self._buffers.tensors], task=task)
        self.rejoin(task)

    def rejoin(self, task: Task) -> None:
        """Restart the counters; see :meth:`Outer.rejoin`."""
        self._weigher.reset(task)
        self._round_client.restart()
        task.free_period()

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        number = task.round
        vector, rounds = broadcast_start(task, self._whole, self._round_client, base=self._base)
        self._base = digest(vector)
        return outcome(rounds[-1], number, rounds[-1].seconds, digest=self._base, delta_norm=0.0)

    def sync(self, task: Task) -> SyncResult | None:
        """Return the round that was run before the optimizer's step."""
        result, self._last = self._last, None
        return result

    def digest(self, task: Task) -> str:
        """Return the digest of the current parameters and buffers."""
        return digest(self._whole.read())

    def committed(self, task: Task) -> Committed:
        """Return the current parameters, with the digest chain as their base."""
        return Committed(task.step, self._base)

    # ----------------------------------------------------------------------------- a round

    def _hold(
        self, task: Task, exchange: Exchanging[V], *, weight: float, norm: float
    ) -> CommittedRound[ExchangeResult[V]]:
        """Run a round and return what all members committed."""
        floor = ExchangeContext(self._round_client.group, task.state_lock.resting, weight)
        return self._round_client.run(
            task, lambda plan: exchange(floor, plan), base=self._base, norm=norm
        )

    def _with_buffers(self, exchange: Exchanging[V]) -> Exchanging[tuple[V, Tensor | None]]:
        """Return an exchange that also averages the buffers, if there are any."""
        if not self._buffers.tensors:
            return lambda floor, plan: _beside(exchange(floor, plan), None)
        buffers, codec = self._buffers.read(), make_codec("fp32")

        def both(
            floor: ExchangeContext, plan: RoundPlan
        ) -> ExchangeResult[tuple[V, Tensor | None]]:
            came = exchange(floor, plan)
            return _beside(came, floor.reduce([buffers], codec=codec, key="buffers"))

        return both

    def _note(
        self,
        task: Task,
        agreed: CommittedRound[ExchangeResult[V]],
        *,
        seconds: Mapping[str, float],
        norm: float,
    ) -> SyncResult:
        """Record an applied round and return its result."""
        came = agreed.reduced
        self._base = hashed(self._base, came.digest)
        self._weigher.reset(task)
        number, task.round = task.round, task.round + 1
        return SyncResult(
            round=number, contributors=came.contributors, weight=came.weight,
            seconds=agreed.seconds | dict(seconds), sent_bytes=agreed.sent_bytes,
            received_bytes=agreed.received_bytes, delta_norm=norm, digest=self._base,
            aborted=agreed.attempts - 1,
        )  # fmt: skip

    def _counts(self, contributors: Sequence[str]) -> bool:
        """Return whether this member's values are in the round's result."""
        return self._round_client.group.me in contributors

    # ------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the digest chain and the counters."""
        base = torch.tensor(list(self._base.encode()), dtype=torch.uint8)
        return {"shared.base": base, "own.counters": self._weigher.state()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        self._base = bytes(state["shared.base"].tolist()).decode()
        if "own.counters" in state:
            self._weigher.load(state["own.counters"])

    def _adopt(self, name: str, vector: Tensor, state: Mapping[str, Tensor]) -> None:
        """Copy an entry of a state into a vector; zero the vector if the entry is missing.

        Raises:
            ConfigError: the entry belongs to another model.
        """
        found = state.get(name)
        if found is None:
            vector.zero_()
            return
        if found.shape != vector.shape:
            raise ConfigError(
                "this state belongs to another model",
                given=f"{name} of {found.numel()} elements", expected=f"{vector.numel()}",
            )  # fmt: skip
        vector.copy_(found)

    # ----------------------------------------------------------------------------- traffic

    def _split(self, elements: int) -> tuple[int, int]:
        """Return how many values of a model are trained, and how many are buffers.

        Before `setup`, and for a model of another size, all values count as trained.
        """
        whole: Flat | None = getattr(self, "_whole", None)
        if whole is None or whole.num_elements != elements:
            return elements, 0
        return self._flat.num_elements, self._buffers.num_elements


def _beside(
    came: ExchangeResult[V], buffers: Reduced | None
) -> ExchangeResult[tuple[V, Tensor | None]]:
    """Pair an exchange's result with the mean of the buffers."""
    if buffers is None:
        return ExchangeResult((came.value, None), came.contributors, came.weight, came.digest)
    return ExchangeResult(
        (came.value, buffers.tensors[0]), came.contributors, came.weight,
        hashed(came.digest, buffers.digest),
    )  # fmt: skip


class GradientRounds(EveryStepBase, ABC, Generic[V]):
    """Exchange gradients before the optimizer's step: every member takes the same step."""

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare the vector for the task's gradients."""
        super().setup(task, group=group, codec=codec)
        self._gradients, self._gradient = Gradients(task), self._flat.new()

    def gradients(self, task: Task) -> None:
        """Run the exchange of this step's gradients and apply its result."""
        entered = self._clock.monotonic()
        norm = self._read(task)
        exchange = self._with_buffers(self.prepare(task, self._gradient))
        prepare_s = self._clock.monotonic() - entered
        task.period.done += 1  # the step whose gradients these are
        try:
            weight = reported_weight(self._weight(task), overflowed=task.overflowed)
            agreed = self._hold(task, exchange, weight=weight, norm=norm)
        finally:
            task.free_period()
        began = self._clock.monotonic()
        value, buffers = agreed.reduced.value
        if buffers is not None:
            self._buffers.write(buffers)
        task.skipped, delta_norm = any_overflowed(agreed.reduced.weight), 0.0
        if not task.skipped:
            delta_norm = self.apply(task, value, counted=self._counts(agreed.reduced.contributors))
        self._gradients.restore_layout()
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        seconds = {"prepare": prepare_s, "apply": apply_s}
        self._last = self._note(task, agreed, seconds=seconds, norm=delta_norm)

    @abstractmethod
    def prepare(self, task: Task, gradient: Tensor) -> Exchanging[V]:
        """Return the exchange of this step's gradient; the vector is kept until it is applied."""

    @abstractmethod
    def apply(self, task: Task, value: V, *, counted: bool) -> float:
        """Apply the exchanged value and return the norm of the direction.

        `counted` is whether this member's own values are in it.
        """

    def _read(self, task: Task) -> float:
        """Read the gradients; return their norm.

        Raises:
            LossNotFinite: one of them is not finite.
        """
        Flat(self._gradients.dense()).read(self._gradient)
        norm = length(self._gradient)
        if not math.isfinite(norm):
            raise LossNotFinite(
                "a gradient is not finite; it was not shared",
                given=f"member {task.member}, step {task.step + 1}",
                expected="finite gradients",
                remedy="lower the learning rate",
            )
        return norm

    def _weight(self, task: Task) -> float:
        """Return the weight of the current step, which is not counted as done yet."""
        if self._weigher.kind == "equal":
            return 1.0
        return float(max(task.tokens - self._weigher.tokens, 0) or 1)

    def _write_gradients(self, direction: Tensor) -> None:
        """Write a direction into the parameters' `grad`, for the inner optimizer."""
        Flat([p.grad for p in self._parameters if p.grad is not None]).write(direction)


def one_round(exchanges: Sequence[Traffic]) -> Traffic:
    """Return the traffic of several exchanges, counted as one round."""
    return replace(total(list(exchanges)), rounds=1)


def buffer_volume(buffers: int, peers: int, *, rank: int) -> Traffic:
    """Return the traffic of averaging the buffers once."""
    if not buffers:
        return Traffic(0, 0, 0, 0, 0)
    return volume(make_codec("fp32"), buffers, peers, rank=rank)


def dense_codec(codec: Codec, *, method: str, why: str) -> Codec:
    """Return the codec if it is dense and stateless.

    Raises:
        ConfigError: it is sparse, lossy or stateful; `why` says why the method needs a dense one.
    """
    if _is_dense(codec):
        return codec
    nearest = codec.base.spec if _is_dense(codec.base) else "fp16"
    raise ConfigError(
        f"{method} cannot use codec {codec.spec}", given=why,
        expected="a codec that sends every number and keeps no state: fp32, fp16, bf16, int8",
        remedy=f"codec = {nearest!r}",
    )  # fmt: skip


def _is_dense(codec: Codec) -> bool:
    if codec.base is not codec or codec.needs_allgather:
        return False
    with torch.device("cpu"):  # also where the model is only shapes
        probe = torch.linspace(1.0, 2.0, 1024)
        found = codec.decode(codec.encode(probe, key="probe"))
        return bool((found - probe).abs().max() <= 0.05)
