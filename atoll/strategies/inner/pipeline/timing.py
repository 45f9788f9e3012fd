"""Stages of a pipeline that can be watched: how long they compute, how many inputs they keep.

What a pipeline's order of work costs, played through event by event. No torch.

Closed forms hold for equal stages and free transfers; this holds for any.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.distributed.pipelining import PipelineStage

from atoll.strategies.inner.options import PipelineShape, Work

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""


class Watch:
    """What the stages of a rank do while it is on. Costs next to nothing while it is off."""

    def __init__(self, device: torch.device) -> None:
        """Be off."""
        self._device = device
        self.on = False
        self.spent_s: defaultdict[tuple[int, bool], float] = defaultdict(float)
        """Time of the last batch by stage, and whether it was forward; the last one's has the
        loss."""
        self.wall_s = 0.0
        """From when all ranks of the row began with the last batch until this one was done."""
        self.held = self.most_held = 0
        """Inputs of stages that are kept for a backward pass, and most at a time in this batch."""

    @contextmanager
    def passing(self, group: Any) -> Iterator[None]:
        """Watch one batch inside; collective over the row of ranks if it is on."""
        self.spent_s.clear()
        self.held = self.most_held = 0
        if self.on:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        begun = self._now()
        yield
        self.wall_s = self._now() - begun

    @contextmanager
    def busy(self, stage: int, *, forward: bool) -> Iterator[None]:
        """Count the time inside as work of a stage."""
        begun = self._now()
        yield
        self.spent_s[stage, forward] += self._now() - begun

    def hold(self, change: int) -> None:
        """Take note that one more input is kept, or one less."""
        self.held += change
        self.most_held = max(self.most_held, self.held)

    def _now(self) -> float:
        """Return the time in seconds; if it is on, when the device has finished all queued work."""
        if self.on and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class WatchedStage(PipelineStage):
    """torch's stage, watched."""

    def __init__(
        self,
        module: nn.Module,
        number: int,
        stages: int,
        device: torch.device,
        *,
        watch: Watch,
        **options: Any,
    ) -> None:
        """Be stage `number`; see torch's for the rest."""
        super().__init__(module, number, stages, device, **options)
        self._watch = watch

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Do the forward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=True):
            outputs = super().forward_one_chunk(*args, **options)
        self._watch.hold(1)
        return outputs

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Do the backward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=False):
            super().backward_one_chunk(*args, **options)
        self._watch.hold(-1)


@dataclass(frozen=True, slots=True)
class Simulated:
    """One batch, played through."""

    wall_s: float
    """From the first forward to the last backward pass."""
    busy_s: tuple[float, ...]
    """By rank: how long it computed."""
    held: tuple[int, ...]
    """By rank: most inputs of stages that it kept for backward passes at one time."""

    @property
    def bubble(self) -> float:
        """Mean share of the time in which a rank had nothing to do."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s)


def simulate(
    shape: PipelineShape,
    *,
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Simulated:
    """Play one batch through a pipeline.

    Args:
        shape: Of the pipeline.
        microbatches: Into how many the batch is cut.
        forward_s: By stage: time of a forward pass of one microbatch.
        backward_s: By stage: time of its backward pass.
        transfer_s: Time of an activation or gradient from one rank to the next.
    """
    orders = [shape.order(k, microbatches=microbatches) for k in range(shape.ranks)]
    done: dict[Work, float] = {}
    free, busy = [0.0] * shape.ranks, [0.0] * shape.ranks
    held, most, at = [0] * shape.ranks, [0] * shape.ranks, [0] * shape.ranks
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                work = order[at[rank]]
                ready = _ready(work, shape.stages, done, transfer_s)
                if ready is None:
                    break
                takes = (forward_s if work.forward else backward_s)[work.stage]
                done[work] = free[rank] = max(free[rank], ready) + takes
                busy[rank] += takes
                held[rank] += 1 if work.forward else -1
                most[rank] = max(most[rank], held[rank])
                at[rank] += 1
                moved = True
    return Simulated(max(free), tuple(busy), tuple(most))


def _ready(work: Work, stages: int, done: dict[Work, float], transfer_s: float) -> float | None:
    """Return when what a piece of work needs is there; None while that is not known."""
    if work.forward:
        if work.stage == 0:
            return 0.0
        needed, far = Work(True, work.stage - 1, work.microbatch), True
    else:
        far = work.stage < stages - 1
        needed = Work(not far, work.stage + 1 if far else work.stage, work.microbatch)
    finished = done.get(needed)
    return None if finished is None else finished + (transfer_s if far else 0.0)
