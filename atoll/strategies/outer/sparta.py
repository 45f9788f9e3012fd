"""SPARTA: average a small random part of the parameters after every step.

The method of EXO's gym for distributed training (https://github.com/exo-explore/gym). Legend: x_i a
member's parameters, S the positions of this step, drawn from a common seed, p their share.

    every member: an optimizer step
    x_i[S] = mean_j x_j[S]

Members' parameters differ between rounds; each step reduces their variance by the share p. With
`every` the method is combined with DiLoCo: every H steps an outer Nesterov step averages all
parameters, starting from where they last were equal.

Differs from that code:
  * the positions are a few out of each stretch of the vector, so drawing them costs time in
    proportion to the share and not to the model, and every round sends the same number;
  * means weigh by the tokens of the step, unless `weight = "equal"`;
  * floating-point buffers are averaged in every step; the optimizer's state stays local;
  * the last round averages all parameters, so that all members end with one model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.methods.every_step import Sparta
from atoll.strategies.base import SyncResult, Traffic
from atoll.strategies.outer.every_step_base import (
    EveryStepBase,
    buffer_volume,
    dense_codec,
    one_round,
)
from atoll.strategies.outer.outer_optimizers import OuterSGD
from atoll.strategies.outer.periodic import start_volume
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, Exchanging
from atoll.strategies.traffic import total, volume
from atoll.strategies.vectors.flat import length
from atoll.strategies.vectors.masks import Mask
from atoll.task import Task
from atoll.wire.messages import RoundPlan


class SpartaOuter(EveryStepBase):
    """See the module's docstring."""

    one_model = False
    one_state = False

    def __init__(self, options: Sparta) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if options.every < 0:
            raise ConfigError("every is too small", given=options.every, expected="0 or more")
        self.options = options
        self._optimizer = OuterSGD(lr=options.outer_lr, momentum=options.outer_momentum)
        self._drawn(0)

    def _drawn(self, elements: int) -> Mask:
        """Return the masks of a model with so many parameters.

        Raises:
            ConfigError: the options describe no valid mask.
        """
        options = self.options
        return Mask(elements, options.probability, options.mask, options.seed)

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare to average parts of the task's parameters."""
        why = "parameters themselves are sent, different ones in every step"
        dense_codec(codec, method="SPARTA", why=why)
        super().setup(task, group=group, codec=codec)
        self._mask = self._drawn(self._flat.num_elements)
        self._vector = self._flat.new()
        self._start = self._flat.read() if self.options.every else self._vector[:0]

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        result = super().begin(task)
        if self.options.every:
            self._flat.read(self._start)
        return result

    # ----------------------------------------------------------------------------- a round

    def sync(self, task: Task) -> SyncResult | None:
        """Average this step's part of the parameters, or take an outer step if one is due."""
        if self.options.every and task.step % self.options.every == 0:
            return self._together(task, outer_step=True)
        entered = self._clock.monotonic()
        positions = self._mask.at(task.round)
        values = self._flat.read(self._vector)[positions]
        norm = self._length(task, values)

        def part(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Tensor]:
            return _mean(floor, values, self._codec, key="part")

        def apply(mean: Tensor) -> None:
            self._vector[positions] = mean
            self._flat.write(self._vector)

        return self._round(task, part, apply, entered=entered, norm=norm)

    def finish(self, task: Task) -> SyncResult | None:
        """Average all parameters, uncompressed."""
        return self._together(task, outer_step=False)

    def _together(self, task: Task, *, outer_step: bool) -> SyncResult:
        """Average all parameters: by an outer step, or plainly."""
        entered = self._clock.monotonic()
        vector = self._flat.read(self._vector)
        codec = self._codec if outer_step else make_codec("fp32")
        if outer_step:
            torch.sub(self._start, vector, out=vector)
        norm = self._length(task, vector)

        def whole(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Tensor]:
            return _mean(floor, vector, codec, key="whole")

        def apply(mean: Tensor) -> None:
            if not outer_step:
                self._flat.write(mean)
                return
            self._optimizer.step(self._start, mean)
            self._flat.write(self._start)

        return self._round(task, whole, apply, entered=entered, norm=norm)

    def _round(
        self, task: Task, exchange: Exchanging[Tensor], apply: Applying, *, entered: float,
        norm: float,
    ) -> SyncResult:  # fmt: skip
        """Run a round and apply the mean."""
        exchange_both = self._with_buffers(exchange)
        prepare_s = self._clock.monotonic() - entered
        weight = self._weigher.weight(task) or 1.0  # at the end nothing was trained since
        try:
            agreed = self._hold(task, exchange_both, weight=weight, norm=norm)
        finally:
            task.free_period()
        began = self._clock.monotonic()
        mean, buffers = agreed.reduced.value
        delta_norm = float(mean.norm())
        apply(mean)
        if buffers is not None:
            self._buffers.write(buffers)
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        seconds = {"prepare": prepare_s, "apply": apply_s}
        return self._note(task, agreed, seconds=seconds, norm=delta_norm)

    def _length(self, task: Task, values: Tensor) -> float:
        norm = length(values)
        if not math.isfinite(norm):
            raise LossNotFinite(
                "parameters are not finite; they were not averaged",
                given=f"member {task.member}, step {task.step}",
                expected="finite parameters",
                remedy="lower the learning rate, or clip the gradients",
            )
        return norm

    # ------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the counters and, with outer steps, the vector those start from."""
        state = super().state_dict()
        if self.options.every:
            moments = self._optimizer.state_dict().items()
            state |= {"shared.start": self._start}
            state |= {f"shared.outer.{name}": value for name, value in moments}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        super().load_state_dict(state)
        if self.options.every:
            self._adopt("shared.start", self._start, state)
            prefix = "shared.outer."
            moments = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            self._optimizer.load_state_dict(moments)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        parameters, buffers = self._split(elements)
        mask, every = self._drawn(parameters), self.options.every
        beside = buffer_volume(buffers, peers, rank=rank)
        rounds = [start_volume(peers, rank=rank)]
        for step in range(1, steps + 1):
            whole = every and step % every == 0
            size = parameters if whole else mask.size(step)  # round 0 is the start
            rounds.append(one_round([volume(self._codec, size, peers, rank=rank), beside]))
        last = volume(make_codec("fp32"), parameters, peers, rank=rank)
        return total([*rounds, one_round([last, beside])])


Applying = Callable[[Tensor], None]


def _mean(
    floor: ExchangeContext, values: Tensor, codec: Codec, *, key: str
) -> ExchangeResult[Tensor]:
    """Exchange one mean."""
    reduced = floor.reduce([values], codec=codec, key=key)
    return ExchangeResult(reduced.tensors[0], reduced.contributors, reduced.weight, reduced.digest)
