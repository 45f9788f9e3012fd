"""How much of a real step the ranks of a pipeline have nothing to do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.timing import simulate

dist: Any = torch.distributed
"""Without types: torch's stubs leave out most of what is used here."""


@dataclass(frozen=True, slots=True)
class Bubble:
    """Shares of the ranks' time without work, 0..1, and what they are made of."""

    measured: float
    """In real steps: the median of several."""
    expected: float
    """By the closed form: stages that are equally fast, and transfers that take no time."""
    played: float
    """With the measured times of every stage, and transfers that take no time."""
    wall_s: float
    """From the first forward to the last backward pass: the median."""
    busy_s: tuple[float, ...]
    """How long each rank of the row computed in that: the median."""


def measure_bubble(
    parts: PipelineParts, inputs: Tensor, targets: Tensor, *, steps: int = 5
) -> Bubble:
    """Do some steps without an optimizer, and return what was seen; collective.

    Gradients are computed and stay. Ranks should have a core or an accelerator each: where several
    share one, each counts as computing while it waits for it.

    Args:
        parts: Of every rank, in training mode.
        inputs: The island's whole batch, (rows, ...).
        targets: What belongs to it.
        steps: That are measured; one more before them is not.
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
    played = simulate(
        shape, microbatches=number,
        forward_s=_each(seen, shape.stages, number, forward=True),
        backward_s=_each(seen, shape.stages, number, forward=False),
    )  # fmt: skip
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
    """Return by stage the time of one pass: the median of several steps."""
    return [
        statistics.median(ranks[stage % len(ranks)][stage, forward] for _, ranks in seen)
        / microbatches
        for stage in range(stages)
    ]
