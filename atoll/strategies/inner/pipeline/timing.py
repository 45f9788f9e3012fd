"""Timing of pipeline stages: measured in real steps, and simulated event by event.

The simulation allows unequal stages and transfers that take time, unlike the closed forms.
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

from atoll.devices.runtime import synchronize
from atoll.strategies.inner.options import PipelineShape, Work

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class Watch:
    """Compute times and kept inputs of a rank's stages. Nearly free while disabled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on = False
        self.spent_s: defaultdict[tuple[int, bool], float] = defaultdict(float)
        """Time of the last batch by stage and direction (True: forward); the last stage includes
        the loss."""
        self.wall_s = 0.0
        """From the start of the last batch on all ranks of the row until its end on this one."""
        self.held = self.most_held = 0
        """Inputs of stages kept for a backward pass: now, and the maximum in this batch."""

    @contextmanager
    def passing(self, group: Any) -> Iterator[None]:
        """Time one batch; if enabled, collective over the row of ranks."""
        self.spent_s.clear()
        self.held = self.most_held = 0
        if self.on:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        begun = self._now()
        yield
        self.wall_s = self._now() - begun

    @contextmanager
    def busy(self, stage: int, *, forward: bool) -> Iterator[None]:
        """Count the time inside as compute time of a stage."""
        begun = self._now()
        yield
        self.spent_s[stage, forward] += self._now() - begun

    def hold(self, change: int) -> None:
        """Count a kept input (+1) or a released one (-1)."""
        self.held += change
        self.most_held = max(self.most_held, self.held)

    def _now(self) -> float:
        """Return the time in seconds; if enabled, after all queued work of the device."""
        if self.on:
            synchronize(self._device)
        return time.perf_counter()


class WatchedStage(PipelineStage):
    """torch's stage, with timing."""

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
        super().__init__(module, number, stages, device, **options)
        self._watch = watch

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run and time the forward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=True):
            outputs = super().forward_one_chunk(*args, **options)
        self._watch.hold(1)
        return outputs

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """Run and time the backward pass of a microbatch."""
        with self._watch.busy(self.stage_index, forward=False):
            super().backward_one_chunk(*args, **options)
        self._watch.hold(-1)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulated batch."""

    wall_s: float
    """From the first forward to the last backward pass."""
    busy_s: tuple[float, ...]
    """Compute time by rank."""
    held: tuple[int, ...]
    """Most inputs of stages kept at one time, by rank."""

    @property
    def bubble(self) -> float:
        """Mean idle share of a rank's time."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s)


def simulate(
    shape: PipelineShape,
    *,
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Simulated:
    """Simulate one batch, with the times of one microbatch by stage.

    `transfer_s` is the time to send an activation or gradient to a neighbour.
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
    """Return when the inputs of a piece of work are available; None while unknown."""
    if work.forward:
        if work.stage == 0:
            return 0.0
        needed, far = Work(True, work.stage - 1, work.microbatch), True
    else:
        far = work.stage < stages - 1
        needed = Work(not far, work.stage + 1 if far else work.stage, work.microbatch)
    finished = done.get(needed)
    return None if finished is None else finished + (transfer_s if far else 0.0)
