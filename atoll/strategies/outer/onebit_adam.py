"""1-bit Adam: Adam during a warm-up, then a frozen variance and one bit per value of momentum.

Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed" (https://arxiv.org/abs/2102.02888), Algorithm 1. Legend: g_i a member's gradient, C the
codec, m the common momentum, v the variance at the end of the warm-up, with bias corrected.

    first `warmup_steps`:  the inner Adam or AdamW on the mean of the gradients, uncompressed
    then:  m_i = beta_1 m + (1 - beta_1) g_i / (sqrt(v) + eps)
           m   = mean of C(m_i + what was lost before), compressed again on its way back
           theta = theta - lr m

Both compressions keep their residual and add it to the next message: members on the way up, chunk
owners on the way down. Learning rate, betas, eps and weight decay are the inner optimizer's; after
the warm-up its update rule and gradient clipping are not used.

Differs from the paper:
  * what is compressed is divided by sqrt(v) + eps beforehand. Without compression that is the same;
    with it one bit's coarseness is a share of the step, not a multiple where v is small;
  * sqrt(v) counts as at least `floor` times the root of its tensor's mean: otherwise an
    element that had no gradient before v was frozen would take a huge first step;
  * the scale belongs to the codec's blocks; the bias correction of m goes on;
  * means weigh by the tokens of the step, unless `weight = "equal"`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.methods.every_step import OneBitAdam
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
from atoll.strategies.vectors.exact_math import tree_sum
from atoll.strategies.vectors.flat import real_view
from atoll.task import Task
from atoll.wire.messages import RoundPlan

Value = Tensor | CompressedMean
"""The mean gradient of the warm-up, or the mean of the compressed momenta."""


class OneBitAdamOuter(GradientRounds[Value]):
    """See the module's docstring."""

    def __init__(self, options: OneBitAdam) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        if options.warmup_steps < 0:
            raise ConfigError(
                "warmup_steps is too small", given=options.warmup_steps, expected="0 or more"
            )
        if not 0.0 <= options.floor <= 1.0:
            raise ConfigError("floor is out of range", given=options.floor, expected="0 to 1")
        self.options = options
        self._warm_steps = max(1, options.warmup_steps)  # the variance has to come from somewhere

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare for the task's gradients.

        Raises:
            ConfigError: the inner optimizer is not Adam, or the codec is stateful.
        """
        _check_optimizer(task.optimizer)
        if codec.base is not codec:
            raise ConfigError(
                f"1-bit Adam cannot use codec {codec.spec}",
                given="it applies error feedback itself",
                expected="the codec inside", remedy=f'codec = "{codec.base.spec}"',
            )  # fmt: skip
        super().setup(task, group=group, codec=codec)
        self._exact = make_codec("fp32")
        self._frozen = False
        self._steps = 0
        self._momentum, self._divisor, self._error, self._owed = (self._gradient[:0],) * 4

    @property
    def can_grow(self) -> bool:  # type: ignore[override]
        """Whether the warm-up lasts: afterwards new parameters would have no variance."""
        return not self._frozen

    # ----------------------------------------------------------------------------- a round

    def prepare(self, task: Task, gradient: Tensor) -> Exchanging[Value]:
        """Average the gradient, or compress the momentum."""
        if task.step < self._warm_steps:
            self._warm = True

            def mean(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Value]:
                reduced = floor.reduce([gradient], codec=self._exact, key="gradient")
                return ExchangeResult(
                    reduced.tensors[0], reduced.contributors, reduced.weight, reduced.digest
                )

            return mean
        self._warm = False
        if not self._frozen:
            self._freeze(task)
        wanted = self._moved(task, gradient)

        def squeeze(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Value]:
            came = both_ways(floor, plan, wanted, self._owed, codec=self._codec)
            return ExchangeResult(came.value, came.contributors, came.weight, came.digest)

        return squeeze

    def _moved(self, task: Task, gradient: Tensor) -> Tensor:
        """Return the member's momentum plus its residual, written into the gradient's vector."""
        momenta, gradients = self._flat.views(self._momentum), self._flat.views(gradient)
        for index, parameter, group in self._groups(task):
            part, beta = gradients[index], float(group["betas"][0])
            if not _decoupled(task.optimizer) and group["weight_decay"]:
                part.add_(real_view(parameter).to(part), alpha=float(group["weight_decay"]))
            part.div_(self._flat.views(self._divisor)[index])
            part.mul_(1.0 - beta).add_(momenta[index], alpha=beta)
        self._wanted = gradient.add_(self._error)
        return self._wanted

    def apply(self, task: Task, value: Value, *, counted: bool) -> float:
        """Pass the mean gradient to Adam, or step along the momentum."""
        if not isinstance(value, CompressedMean):
            self._write_gradients(value)
            return float(value.norm())
        self._momentum = value.mean.clone()
        torch.sub(self._wanted, value.sent, out=self._error)
        self._owed[value.owned] = value.left
        self._steps += 1
        direction = value.mean
        parts = self._flat.views(direction)
        for index, _, group in self._groups(task):
            parts[index].div_(1.0 - float(group["betas"][0]) ** self._steps)
        own_step(task, self._flat, direction, decay=_decoupled(task.optimizer))
        return float(direction.norm())

    # ------------------------------------------------------------------- end of the warm-up

    def _freeze(self, task: Task) -> None:
        """Copy momentum and variance from Adam.

        Raises:
            ConfigError: Adam has none yet.
        """
        self._momentum, self._divisor = self._flat.new().zero_(), self._flat.new().fill_(1.0)
        self._error, self._owed = self._flat.new().zero_(), self._flat.new().zero_()
        momenta, divisors = self._flat.views(self._momentum), self._flat.views(self._divisor)
        for index, parameter, group in self._groups(task):
            state = task.optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                raise ConfigError(
                    "1-bit Adam found no moments at the end of its warm-up",
                    given=f"step {task.step}, warmup_steps = {self.options.warmup_steps}",
                    expected="the state of the inner Adam",
                    remedy="resume with the optimizer's state, or with a longer warm-up",
                )
            self._steps = int(state["step"])
            root = real_view(state["exp_avg_sq"]).float().cpu().sqrt()
            root /= (1.0 - float(group["betas"][1]) ** self._steps) ** 0.5
            typical = tree_sum(root.double().flatten().square()) / max(1, root.numel())
            root.clamp_(min=self.options.floor * float(typical.sqrt()))
            divisors[index].copy_(root.add_(float(group["eps"])))
            momenta[index].copy_(real_view(state["exp_avg"])).div_(divisors[index])
        self._frozen = True

    def _groups(self, task: Task) -> Iterator[tuple[int, nn.Parameter, dict[str, Any]]]:
        """Yield every optimized parameter's index, itself and its group."""
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        for group in task.optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in indices:
                    yield indices[id(parameter)], parameter, group

    # ------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return the frozen variance, the common momentum and the residuals."""
        state = super().state_dict()
        if self._frozen:
            state |= {
                "shared.momentum": self._momentum,
                "shared.divisor": self._divisor,
                "shared.steps": torch.tensor(self._steps),
                "own.error": self._error,
                "own.owed": self._owed,
            }
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member starts without residuals."""
        super().load_state_dict(state)
        self._frozen = "shared.divisor" in state
        if not self._frozen:
            return
        self._steps = int(state["shared.steps"])
        self._momentum, self._divisor = self._flat.new(), self._flat.new()
        self._error, self._owed = self._flat.new(), self._flat.new()
        self._adopt("shared.momentum", self._momentum, state)
        self._adopt("shared.divisor", self._divisor, state)
        self._adopt("own.error", self._error, state)
        self._adopt("own.owed", self._owed, state)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        parameters, buffers = self._split(elements)
        beside = buffer_volume(buffers, peers, rank=rank)
        warm = min(steps, self._warm_steps)
        exact = volume(make_codec("fp32"), parameters, peers, rank=rank)
        squeezed = compressed_volume(self._codec, parameters, peers, rank=rank)
        return total(
            [
                start_volume(peers, rank=rank),
                times(one_round([exact, beside]), warm),
                times(one_round([squeezed, beside]), steps - warm),
            ]
        )


def _decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether weight decay shrinks parameters, rather than to be added to gradients."""
    decoupled = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    return decoupled or isinstance(optimizer, torch.optim.AdamW)


def _check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose variance cannot be frozen.

    Raises:
        ConfigError: it is not Adam or AdamW, or one of their variants.
    """
    fits = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    variants = ("amsgrad", "maximize")
    used = [name for name in variants if any(g.get(name) for g in optimizer.param_groups)]
    if fits and not used:
        return
    raise ConfigError(
        "1-bit Adam needs Adam for its warm-up",
        given=type(optimizer).__name__ + "".join(f" with {name}" for name in used),
        expected="torch.optim.Adam or AdamW without variants",
        remedy='optimizer = "adamw" in [train]; other optimizers: outer = "sign_majority" with '
        "feedback, or every_step with codec feedback(sign)",
    )
