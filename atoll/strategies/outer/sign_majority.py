"""signSGD with majority vote: members vote on the sign of every value, then take equal steps.

Bernstein et al. 2018, "signSGD with Majority Vote is Communication Efficient and Fault Tolerant"
(https://arxiv.org/abs/1810.05291), Algorithm 1. Legend: g_i a member's gradient, beta = `momentum`.

    m_i   = beta m_i + (1 - beta) g_i
    v     = sign(sum_i sign(m_i))            with codec `sign`: one bit up, one bit down
    theta = (1 - lr * weight_decay) theta - lr v

The method replaces the inner optimizer: it uses only that optimizer's `lr` and `weight_decay`, not
its update rule or gradient clipping. Learning rates are those of Adam, about 1e-4 to 1e-2.

With `feedback` the signs carry a scale, and both members and chunk owners keep residuals: blockwise
signSGD with error feedback (Zheng et al. 2019, https://arxiv.org/abs/1905.10936), which converges
where the plain vote does not. `v` then has the gradient's length, and learning rates are those of
SGD.

Differs from the papers:
  * one bit cannot say zero: zeros, and ties between members, count as + in even rounds and as - in
    odd ones, so that a value without any gradient stays within one step of its place;
  * votes weigh the same; `weight = "tokens"` weighs them by the tokens of the step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.every_step import SignMajority
from atoll.strategies.base import Traffic
from atoll.strategies.outer.base import own_step
from atoll.strategies.outer.every_step_base import GradientRounds, buffer_volume, one_round
from atoll.strategies.outer.periodic import start_volume
from atoll.strategies.rounds.compressed_allreduce import (
    CompressedMean,
    both_ways,
    compressed_volume,
)
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, Exchanging
from atoll.strategies.traffic import times, total, volume
from atoll.task import Task
from atoll.wire.messages import RoundPlan

Voted = Tensor | CompressedMean
"""The mean vote, or with feedback the mean of the scaled signs."""


class SignMajorityOuter(GradientRounds[Voted]):
    """See the module's docstring."""

    def __init__(self, options: SignMajority) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if not 0.0 <= options.momentum < 1.0:
            raise ConfigError(
                "momentum is out of range", given=options.momentum, expected="0 up to below 1"
            )
        self.options = options

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare for votes on the task's parameters.

        Raises:
            ConfigError: the codec cannot encode signs.
        """
        if codec.needs_allgather or codec.base is not codec:
            raise ConfigError(
                f"signSGD cannot use codec {codec.spec}",
                given="votes are one sign per number: no codec with state or selection fits",
                expected="sign, or any codec that sends every number", remedy='codec = "sign"',
            )  # fmt: skip
        super().setup(task, group=group, codec=codec)
        empty = self._gradient[:0]
        self._momentum = self._flat.new().zero_() if self.options.momentum else empty
        feedback = self.options.feedback
        self._error = self._flat.new().zero_() if feedback else empty
        self._owed = self._flat.new().zero_() if feedback else empty

    def prepare(self, task: Task, gradient: Tensor) -> Exchanging[Voted]:
        """Vote on the gradient, or on its momentum."""
        beta = self.options.momentum
        if beta:
            gradient.mul_(1.0 - beta).add_(self._momentum, alpha=beta)
        if self.options.feedback:
            wanted = gradient + self._error
            self._wanted = wanted

            def squeeze(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Voted]:
                came = both_ways(floor, plan, wanted, self._owed, codec=self._codec)
                return ExchangeResult(came.value, came.contributors, came.weight, came.digest)

            return squeeze
        self._flip = 1.0 if task.round % 2 == 0 else -1.0
        votes = (gradient * self._flip >= 0).float().mul_(2.0).sub_(1.0)

        def vote(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Voted]:
            reduced = floor.reduce([votes], codec=self._codec, key="votes")
            return ExchangeResult(
                reduced.tensors[0], reduced.contributors, reduced.weight, reduced.digest
            )

        return vote

    def apply(self, task: Task, value: Voted, *, counted: bool) -> float:
        """Step along the vote."""
        if self.options.momentum:
            self._momentum.copy_(self._gradient)
        if isinstance(value, CompressedMean):
            torch.sub(self._wanted, value.sent, out=self._error)
            self._owed[value.owned] = value.left
            direction = value.mean
        else:
            ahead = (value >= 0).float().mul_(2.0).sub_(1.0)
            direction = ahead.mul_(self._flip)
        own_step(task, self._flat, direction)
        return float(direction.norm())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the member's momentum and residuals."""
        own = {"momentum": self._momentum, "error": self._error, "owed": self._owed}
        return super().state_dict() | {f"own.{k}": v for k, v in own.items() if v.numel()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member starts without residuals."""
        super().load_state_dict(state)
        self._adopt("own.momentum", self._momentum, state)
        self._adopt("own.error", self._error, state)
        self._adopt("own.owed", self._owed, state)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        parameters, buffers = self._split(elements)
        of = compressed_volume if self.options.feedback else volume
        votes = of(self._codec, parameters, peers, rank=rank)
        each = one_round([votes, buffer_volume(buffers, peers, rank=rank)])
        return total([start_volume(peers, rank=rank), times(each, steps)])
