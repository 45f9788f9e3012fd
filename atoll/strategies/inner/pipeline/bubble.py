"""Measures the idle time of a pipeline's ranks in real steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle shares of the ranks' time, 0..1, and the measurements behind them."""

    measured: float
    """Median of several real steps."""
    expected: float
    """In closed form, for equally fast stages and free transfers."""
    played: float
    """Simulated with the measured times of every stage, and free transfers."""
    wall_s: float
    """Median time from the first forward to the last backward pass."""
    busy_s: tuple[float, ...]
    """Median compute time of each rank of the row."""


def measure_bubble(
    parts: PipelineParts, inputs: Tensor, targets: Tensor, *, steps: int = 5
) -> Bubble:
    """Measure some steps without an optimizer, after one warm-up; collective.

    Gradients are computed and kept. Each rank should have its own core or accelerator: waiting for
    a shared one counts as computing. `parts` MUST be in training mode.
    """
    watch, shape = parts.watch, parts.shape
    group = parts.mesh.get_group("pipeline")
    seen: list[tuple[float, list[dict[tuple[int, bool], float]]]] = []
    watch.on = True
    try:
        for step in range(steps + 1):
            parts.backward(inputs, targets)
            by_rank: list[Any] = [None] * shape.ranks
            dist.all_gather_object(by_rank, (watch.wall_s, dict(watch.spent_s)), group=group)
            if step:
                seen.append((max(wall for wall, _ in by_rank), [spent for _, spent in by_rank]))
    finally:
        watch.on = False
    runs = [(wall, [sum(spent.values()) for spent in ranks]) for wall, ranks in seen]
    number = parts.passes(len(inputs))
    times = StageTimes(
        forward_s=_each(seen, shape.stages, number, forward=True),
        backward_s=_each(seen, shape.stages, number, forward=False),
    )
    played = simulate(shape, times, microbatches=number)
    return Bubble(
        measured=statistics.median(1 - sum(busy) / (shape.ranks * wall) for wall, busy in runs),
        expected=shape.bubble(number),
        played=played.bubble,
        wall_s=statistics.median(wall for wall, _ in runs),
        busy_s=tuple(statistics.median(busy[k] for _, busy in runs) for k in range(shape.ranks)),
    )


def _each(
    seen: Sequence[tuple[float, Sequence[dict[tuple[int, bool], float]]]],
    stages: int,
    microbatches: int,
    *,
    forward: bool,
) -> list[float]:
    """Return the median time of one pass by stage."""
    return [
        statistics.median(ranks[stage % len(ranks)][stage, forward] for _, ranks in seen)
        / microbatches
        for stage in range(stages)
    ]
