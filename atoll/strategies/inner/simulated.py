"""What a pipeline's order of work costs, played through event by event. No torch.

Closed forms hold for equal stages and free transfers; this holds for any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.strategies.inner.schedules import PipelineShape, Work


@dataclass(frozen=True, slots=True)
class Played:
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


def play(
    shape: PipelineShape,
    *,
    microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: float = 0.0,
) -> Played:
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
    return Played(max(free), tuple(busy), tuple(most))


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
