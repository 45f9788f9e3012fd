"""CocktailSGD: exchange compressed model differences in every step, one step late.

Wang et al. 2023, "CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks"
(https://proceedings.mlr.press/v202/wang23t.html). Legend: x_i a member's parameters, w a copy that
is equal on all members, S the positions of this round, C the codec, e_j the residual of owner j of
a part of S.

    after a step, in the background while the next batch is computed:
      c_i = C(x_i[S] - w[S])                to the owners of its parts
      c   = C(mean_i c_i + e)               from each owner to all;  e += mean_i c_i - c
    before the next optimizer step, which then applies that batch's gradient:
      x_i[S] += c - c_i ;  w[S] += c

Members send the difference to the common copy, so any inner optimizer works and unsent values stay
in that difference. mean_i x_i + sum_j e_j is the same before and after an exchange. With
`probability = 1` and codec fp32 the method averages parameters in every step, one step late.

Differs from the paper and its code:
  * the common copy is in float32, so that no rounding error builds up in it;
  * positions are taken from all stretches of the vector, and the parts are those of S;
  * an owner stores e by position, so that parts can change owners when members join and leave;
  * floating-point buffers are averaged in every step, uncompressed and one step late;
  * the last round averages all parameters plus the owners' residuals: all members end equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from atoll.codec.base import Codec
from atoll.codec.registry import make_codec
from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.group.run_round import CommittedRound
from atoll.methods.every_step import Cocktail
from atoll.strategies.base import HIDDEN, SyncResult, Traffic
from atoll.strategies.outer.every_step_base import EveryStepBase, buffer_volume, one_round
from atoll.strategies.outer.overlapped import in_a_row
from atoll.strategies.outer.periodic import start_volume
from atoll.strategies.rounds.background_round import CompressedResult, DelayedRound, Found
from atoll.strategies.rounds.compressed_allreduce import (
    CompressedMean,
    both_ways,
    compressed_volume,
)
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, Exchanging, hashed
from atoll.strategies.traffic import total, volume
from atoll.strategies.vectors.flat import length
from atoll.strategies.vectors.masks import Mask
from atoll.task import Task
from atoll.wire.messages import RoundPlan


class CocktailOuter(EveryStepBase):
    """See the module's docstring."""

    one_model = False
    one_state = False

    def __init__(self, options: Cocktail) -> None:
        """Check the options."""
        super().__init__(weight=options.weight)
        self.options = options
        self._passing: DelayedRound | None = None
        self._due = False
        """The round of this step was not begun in the background: it is run before the step."""
        self._stopping = False
        self._masks(0)

    def _masks(self, elements: int) -> Mask:
        """Return the masks of a model with so many parameters.

        Raises:
            ConfigError: the options describe no valid mask.
        """
        options = self.options
        return Mask(elements, options.probability, options.mask, options.seed)

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Use the current parameters as the common copy.

        Raises:
            ConfigError: the codec is stateful.
        """
        if codec.base is not codec:
            raise ConfigError(
                f"CocktailSGD cannot use codec {codec.spec}",
                given="it applies error feedback itself",
                expected="the codec inside", remedy=f'codec = "{codec.base.spec}"',
            )  # fmt: skip
        super().setup(task, group=group, codec=codec)
        self._mask = self._masks(self._flat.num_elements)
        self._common = self._flat.read()
        self._owed = self._flat.new().zero_()
        self._number = 0
        """Number of exchanges so far, which determines the next positions."""

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        result = super().begin(task)
        self._flat.read(self._common)
        return result

    # ------------------------------------------------------------------------- steps

    def gradients(self, task: Task) -> None:
        """Apply the round that ran during this batch."""
        task.skipped = task.overflowed  # each member steps by itself, so it may skip by itself
        if self._passing is None and not self._due:
            return  # the very first step
        self._last = self._take(task)

    def sync(self, task: Task) -> SyncResult | None:
        """Begin the next round, and return the one applied before the step."""
        if not self._stopping:
            self._start(task)
        return super().sync(task)

    def finish(self, task: Task) -> SyncResult | None:
        """Apply the round under way, then average everything, including the owners' residuals."""
        applied = [self._take(task)] if self._passing is not None or self._due else []
        result = in_a_row([*applied, self._together(task)])
        self._flat.read(self._common)
        self._owed.zero_()
        self._due = False
        return result

    # ----------------------------------------------------------------------------- a round

    def _start(self, task: Task) -> None:
        """Begin a round in the background."""
        entered = self._clock.monotonic()
        passing, exchange, norm, weight = self._prepared(task)
        floor = ExchangeContext(self._round_client.group, nullcontext, weight)
        passing.work = self._round_client.start(
            lambda plan: exchange(floor, plan),
            self._round_client.report(task, base=self._base, norm=norm),
        )
        task.free_period()
        passing.prepare_s = self._clock.monotonic() - entered
        self._passing = passing

    def _prepared(
        self, task: Task
    ) -> tuple[DelayedRound, Exchanging[tuple[CompressedMean, Tensor | None]], float, float]:
        """Return a round ready to begin: its exchange, norm and weight.

        Raises:
            LossNotFinite: a parameter is not finite.
        """
        positions, codec = self._mask.at(self._number), self._codec
        difference = self._flat.read()[positions].sub_(self._common[positions])
        norm = length(difference)
        if not math.isfinite(norm):
            raise LossNotFinite(
                "parameters are not finite; they were not shared",
                given=f"member {task.member}, step {task.step}",
                expected="finite parameters",
                remedy="lower the learning rate, or clip the gradients",
            )
        owed = self._owed[positions]

        def squeeze(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[CompressedMean]:
            return both_ways(floor, plan, difference, owed, codec=codec)

        weight = self._weigher.weight(task) or 1.0
        self._weigher.reset(task)
        passing = DelayedRound(positions, self._buffers.read())
        return passing, self._with_buffers(squeeze), norm, weight

    def _take(self, task: Task) -> SyncResult:
        """Wait for the round under way, or run the one that is due, and apply its result.

        Raises:
            LeftBehind: the others committed without this member; it has to recover.
            GroupLeft: this member leaves.
            GroupError: the members cannot agree any more.
        """
        passing, self._passing, self._due = self._passing, None, True
        agreed: CommittedRound[Found] | None = None
        seconds = dict.fromkeys(("prepare", "join", "reduce", "commit"), 0.0)
        if passing is None:
            passing, exchange, norm, weight = self._prepared(task)
            agreed = self._hold(task, exchange, weight=weight, norm=norm)
            seconds |= agreed.seconds
        elif passing.work is not None:
            entered = self._clock.monotonic()
            with task.state_lock.resting():
                agreed = passing.work.wait()
            waited_s = self._clock.monotonic() - entered
            self._round_client.apply_verdict(task, agreed, ahead=True)
            hidden_s = max(0.0, sum(agreed.seconds.values()) - waited_s)
            seconds |= {"prepare": passing.prepare_s, "reduce": waited_s, HIDDEN: hidden_s}
        result = passing.loaded
        if agreed is not None:
            result = CompressedResult.of(agreed.reduced, passing.buffers)
            self._stopping = agreed.plan.stopping
        if result is None:
            raise RuntimeError("a round is either under way or loaded")
        return self._apply(task, passing.positions, result, agreed, seconds)

    def _apply(
        self,
        task: Task,
        positions: Tensor,
        result: CompressedResult,
        agreed: CommittedRound[Found] | None,
        seconds: dict[str, float],
    ) -> SyncResult:
        """Update the parameters and the common copy."""
        began, squeezed = self._clock.monotonic(), result.squeezed
        vector = self._flat.read()
        if squeezed.alone:
            # A single member has no differences to send: it takes its residual back exactly.
            vector[positions] += self._owed[positions]
            self._owed[positions] = 0.0
            self._common[positions] = vector[positions]
        else:
            vector[positions] = vector[positions].sub_(squeezed.sent).add_(squeezed.mean)
            self._common[positions] += squeezed.mean
            self._owed[positions[squeezed.owned]] = squeezed.left.to(self._owed.dtype)
        self._flat.write(vector)
        if result.moved.numel():
            self._buffers.write(self._buffers.read().add_(result.moved))
        self._number += 1
        self._due = False
        # A loaded result may belong to a round that the group has yet to count.
        number = task.round
        task.round = number + 1 if agreed is not None else self._round_client.group.committed_round
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        return self._result_of(number, result, agreed, seconds | {"apply": apply_s})

    def _result_of(
        self,
        number: int,
        result: CompressedResult,
        agreed: CommittedRound[Found] | None,
        seconds: Mapping[str, float],
    ) -> SyncResult:
        """Return the result of an applied round."""
        self._base = hashed(self._base, result.digest)
        return SyncResult(
            round=number, contributors=result.contributors, weight=result.weight, seconds=seconds,
            sent_bytes=agreed.sent_bytes if agreed is not None else 0,
            received_bytes=agreed.received_bytes if agreed is not None else 0,
            delta_norm=float(result.squeezed.mean.norm()), digest=self._base,
            aborted=agreed.attempts - 1 if agreed is not None else 0,
            stopping=agreed is not None and agreed.plan.stopping,
        )  # fmt: skip

    def _together(self, task: Task) -> SyncResult:
        """Average all parameters plus the owners' residuals, uncompressed."""
        entered, codec = self._clock.monotonic(), make_codec("fp32")
        vector = self._flat.read()

        def mean(floor: ExchangeContext, plan: RoundPlan) -> ExchangeResult[Tensor]:
            found = floor.reduce([vector, self._owed], codec=codec, key="whole")
            mean, owed = found.tensors
            mean.add_(owed, alpha=float(len(found.contributors)))
            return ExchangeResult(mean, found.contributors, found.weight, found.digest)

        exchange = self._with_buffers(mean)
        prepare_s = self._clock.monotonic() - entered
        agreed = self._hold(task, exchange, weight=1.0, norm=length(vector))
        began = self._clock.monotonic()
        found, buffers = agreed.reduced.value
        norm = float((found - vector).norm())
        self._flat.write(found)
        if buffers is not None:
            self._buffers.write(buffers)
        seconds = {"prepare": prepare_s, "apply": self._clock.monotonic() - began}
        return self._note(task, agreed, seconds=seconds, norm=norm)

    # ------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state; waits for a round under way and includes its result."""
        pending = self._passing.pending() if self._passing is not None else {}
        own = {"own.owed": self._owed, "own.counters": self._weigher.state()}
        return self.shared_state() | own | pending

    def shared_state(self) -> dict[str, Tensor]:
        """Return the common copy, without the round under way; see :meth:`Outer.shared_state`."""
        number = torch.tensor(self._number)
        base = super().state_dict()["shared.base"]
        return {"shared.base": base, "shared.common": self._common, "shared.number": number}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state; a joining member starts without residuals."""
        if self._passing is not None:
            self._passing.end()
        super().load_state_dict(state)
        self._number = int(state["shared.number"])
        self._adopt("shared.common", self._common, state)
        self._adopt("own.owed", self._owed, state)
        loaded = CompressedResult.load(state, buffers=self._buffers.num_elements)
        self._passing = None
        if loaded is not None:
            positions = self._mask.at(self._number)
            self._passing = DelayedRound(positions, self._buffers.read(), loaded=loaded)
        self._due, self._stopping = loaded is None, False

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        parameters, buffers = self._split(elements)
        mask, beside = self._masks(parameters), buffer_volume(buffers, peers, rank=rank)
        rounds = [start_volume(peers, rank=rank)]
        for number in range(steps):
            squeezed = compressed_volume(self._codec, mask.size(number), peers, rank=rank)
            rounds.append(one_round([squeezed, beside]))
        last = volume(make_codec("fp32"), 2 * parameters, peers, rank=rank)
        return total([*rounds, one_round([last, beside])])
