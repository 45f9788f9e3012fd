"""Data parallel: the members' gradients are averaged in every step.

This is the computation of torch's DistributedDataParallel without its buckets and overlap, and the
baseline for methods that communicate less. Parameters stay equal because every member takes the
same step from the same start.

Differs from DistributedDataParallel:
  * gradients weigh by the tokens of the step, so that uneven batches give the mean over all
    tokens, not the mean of means (`weight = "equal"` gives the latter);
  * floating-point buffers are averaged, not taken from the first member;
  * a parameter without a gradient takes part with zeros;
  * a sparse gradient is exchanged as a dense one;
  * gradients may be summed, and the learning rate may follow the number of members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.codec.base import Codec
from atoll.digest import Digest
from atoll.errors import ConfigError, LossNotFinite, unknown
from atoll.group.base import Group
from atoll.group.collectives.costs import moved_bytes, star_bytes, wire_elements
from atoll.methods.every_step import EveryStep
from atoll.strategies.base import (
    Committed,
    SyncResult,
    Traffic,
    any_overflowed,
    reported_weight,
)
from atoll.strategies.codec_selection import codec_state, load_codec_state
from atoll.strategies.outer.base import SCALINGS, OuterDefaults, ScaledRate
from atoll.strategies.outer.periodic import WeightRule, outcome, start_volume
from atoll.strategies.rounds.initial_sync import broadcast_start
from atoll.strategies.rounds.round_client import RoundClient, restore_mean
from atoll.strategies.traffic import times, total, volume
from atoll.strategies.vectors.flat import Flat, digest, length
from atoll.strategies.vectors.gradients import Gradients
from atoll.task import Task

REDUCTIONS = ("average", "sum")


class EveryStepOuter(OuterDefaults):
    """Average gradients in every step; see the module's docstring."""

    def __init__(self, options: EveryStep, *, clock: Clock | None = None) -> None:
        """Check the options."""
        for name, given, known in (
            ("reduction", options.reduction, REDUCTIONS),
            ("lr_scaling", options.lr_scaling, SCALINGS),
        ):
            if given not in known:
                raise unknown(name, given, known)
        if options.lr_warmup < 0 or (options.lr_warmup and options.lr_scaling == "none"):
            raise ConfigError(
                "lr_warmup needs lr_scaling" if options.lr_warmup > 0 else "lr_warmup is negative",
                given=f"lr_warmup = {options.lr_warmup}, lr_scaling = {options.lr_scaling!r}",
                expected='0, or steps with lr_scaling = "linear" or "sqrt"',
                remedy="warmup in [train] warms the learning rate itself up",
            )
        if options.reduction == "sum" and options.lr_scaling != "none":
            raise ConfigError(
                "a sum is already scaled by the number of members",
                given=f"reduction = 'sum' with lr_scaling = {options.lr_scaling!r}",
                expected="one of the two",
                remedy='reduction = "average"',
            )
        self.options = options
        self._weigher = WeightRule(options.weight)
        self._clock: Clock = clock if clock is not None else RealClock()
        self._base = "start"
        self._last: SyncResult | None = None
        self._rate = ScaledRate(options.lr_scaling, warmup=options.lr_warmup)
        self._collective = "auto"

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Prepare the vector for the task's gradients."""
        self._round_client, self._codec = RoundClient(group, self._clock, codec=codec), codec
        self._gradients, self._buffers = Gradients(task), task.buffers()
        self._state = Flat.of(task)
        codec.set_shapes(self._state.shapes)
        self._scratch = self._state.new()
        self._collective = group.aggregation.collective
        self._rate.attach(task.optimizer)
        self.rejoin(task)

    def rejoin(self, task: Task) -> None:
        """Restart the counters; see :meth:`Outer.rejoin`."""
        self._weigher.reset(task)
        self._round_client.restart()
        task.free_period()

    def begin(self, task: Task) -> SyncResult | None:
        """Broadcast the first member's parameters to all members."""
        number = task.round
        vector, rounds = broadcast_start(task, self._state, self._round_client, base=self._base)
        self._base = digest(vector)
        return outcome(rounds[-1], number, rounds[-1].seconds, digest=self._base, delta_norm=0.0)

    def gradients(self, task: Task) -> None:
        """Replace every gradient by the mean over the members."""
        entered = self._clock.monotonic()
        combined = Flat([*self._gradients.dense(), *self._buffers])
        vector = combined.read(self._scratch)
        norm = length(vector)
        if not math.isfinite(norm):
            raise LossNotFinite(
                "a gradient is not finite; it was not averaged",
                given=f"member {task.member}, step {task.step + 1}",
                expected="finite gradients",
                remedy="lower the learning rate, or clip the gradients",
            )
        number, prepare_s = task.round, self._clock.monotonic() - entered
        task.period.done += 1  # the step whose gradients these are
        try:
            exchange = self._round_client.mean_of(
                task, [vector], codec=self._codec, weight=self._weight(task), key="gradient"
            )
            agreed = self._round_client.run(task, exchange, base=self._base, norm=norm)
            agreed = restore_mean(agreed, codec=self._codec, key="gradient")
        finally:
            task.free_period()
        began = self._clock.monotonic()
        mean, members = agreed.reduced.tensors[0], len(agreed.reduced.contributors)
        if self.options.reduction == "sum":
            mean[: task.num_parameters].mul_(members)
        combined.write(mean)
        self._gradients.restore_layout()
        self._rate.set(members, step=task.step)
        task.skipped = any_overflowed(agreed.reduced.weight)
        # The parameters follow from the agreed gradients, so hashing those in every step is enough.
        chain = (self._base + agreed.reduced.digest).encode()
        self._base = Digest(chain).hexdigest()
        self._weigher.reset(task)
        task.round = number + 1
        apply_s = self._clock.monotonic() - began
        self._round_client.note_applied(apply_s)
        seconds = agreed.seconds | {"prepare": prepare_s, "apply": apply_s}
        self._last = outcome(
            agreed, number, seconds, digest=self._base, delta_norm=float(mean.norm())
        )

    def _weight(self, task: Task) -> float:
        """Return the weight of the current step, which is not counted as done yet."""
        tokens = 1.0
        if self._weigher.kind == "tokens":
            tokens = float(max(task.tokens - self._weigher.tokens, 0) or 1)
        return reported_weight(tokens, overflowed=task.overflowed)

    def sync(self, task: Task) -> SyncResult | None:
        """Return the round in which this step's gradients were averaged."""
        result, self._last = self._last, None
        return result

    def digest(self, task: Task) -> str:
        """Return the digest of the current parameters and buffers."""
        return digest(self._state.read(self._scratch))

    def committed(self, task: Task) -> Committed:
        """Return the current parameters: members always hold agreed ones."""
        return Committed(task.step, self._base)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the digest chain, the counters and the codec's residuals."""
        base = torch.tensor(list(self._base.encode()), dtype=torch.uint8)
        return {
            "shared.base": base,
            "own.counters": self._weigher.state(),
            **codec_state(self._codec),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned."""
        self._base = bytes(state["shared.base"].tolist()).decode()
        if "own.counters" in state:
            self._weigher.load(state["own.counters"])
        load_codec_state(self._codec, state)

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic; see :meth:`Outer.traffic`."""
        each = volume(self._codec, elements, peers, rank=rank)
        if peers > 1 and self._collective != "auto":
            sent, received = collective_bytes(
                self._collective, self._codec, elements, peers, rank=rank
            )
            each = replace(each, direct_sent_bytes=sent, direct_received_bytes=received)
        return total([start_volume(peers, rank=rank), times(each, steps)])


def collective_bytes(
    collective: str, codec: Codec, elements: int, peers: int, *, rank: int
) -> tuple[int, int]:
    """Return the bytes a member sends and receives in a reduce by a named collective."""
    if collective == "star":
        up, down = codec.nbytes(elements), codec.base.nbytes(elements)
        return star_bytes(up, down, rank=rank, members=peers)
    length = wire_elements(elements, peers)
    return moved_bytes(collective, rank=rank, members=peers, elements=length)
