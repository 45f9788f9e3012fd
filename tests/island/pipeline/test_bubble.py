"""The time in which a rank of a real pipeline has nothing to do, on a clock that only counts work.

Seconds would say more about a busy machine than about the pipeline. So the numbers that go from
stage to stage are times: a pass begins when its rank is free and its input was finished.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.pipeline.bubble import Bubble, measure_bubble
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate
from tests.island.pipeline.kit import pipeline
from tests.island.pool import Ranks
from tests.island.reference import Perceptron

FORWARD, BACKWARD = 1.0, 2.0
MICROBATCHES, WIDTH = 4, 3


class Clock:
    """One rank's time: it moves by work, and by waiting for what others finish later."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def work(self, needed: Tensor, takes: float) -> Tensor:
        """Return the time when work on something ends, in the shape of that."""
        self.now = max(self.now, float(needed.max())) + takes
        self.worked += takes
        return torch.full_like(needed, self.now)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock, share: float) -> Tensor:
        ctx.clock, ctx.share = clock, share
        return clock.work(x, FORWARD * share)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.clock.work(gradient, BACKWARD * ctx.share), None, None


class _Stage(nn.Module):
    def __init__(self, clock: Clock, share: float) -> None:
        super().__init__()
        self.clock, self.share = clock, share
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Timed.apply(x * self.scale, self.clock, self.share)  # type: ignore[no-untyped-call]
        return found


def counted_parts(clock: Clock, count: int, shares: list[float], words: dict[str, Any]) -> Any:
    model = Perceptron(*(_Stage(clock, share) for share in shares))
    cuts = tuple(range(1, len(shares)))
    return pipeline(model, {"pipeline": count}, cuts=cuts, microbatches=MICROBATCHES, **words)


def _counted(count: int, shares: list[float], words: dict[str, Any]) -> tuple[float, float]:
    """Return when this rank has done a batch, and how long it worked."""
    clock = Clock()
    parts = counted_parts(clock, count, shares, words)
    rows = torch.zeros(8, WIDTH)
    parts.backward(rows, rows)  # finds shapes by a pass of its own
    clock.now = clock.worked = 0.0
    parts.backward(rows, rows)
    return clock.now, clock.worked


CASES = [
    (2, 1, {"schedule": "gpipe"}),
    (2, 1, {"schedule": "1f1b"}),
    (2, 2, {"schedule": "interleaved", "chunks": 2}),
    (4, 1, {"schedule": "1f1b"}),
]


@pytest.mark.parametrize(("count", "chunks", "words"), CASES)
def test_bubbles_are_those_of_the_closed_form(
    ranks: Ranks, count: int, chunks: int, words: dict[str, Any]
) -> None:
    shape = PipelineShape(words["schedule"], count, chunks)
    by_rank = ranks.run(count, _counted, count, [1.0 / chunks] * shape.stages, words)
    whole = max(ended for ended, _ in by_rank)
    assert all(worked == MICROBATCHES * (FORWARD + BACKWARD) for _, worked in by_rank)
    bubble = 1 - sum(worked for _, worked in by_rank) / (count * whole)
    assert bubble == pytest.approx(shape.bubble(MICROBATCHES))


def test_unlike_stages_explain_a_larger_bubble(ranks: Ranks) -> None:
    by_rank = ranks.run(2, _counted, 2, [1.0, 3.0], {})
    times = StageTimes(forward_s=[FORWARD, 3 * FORWARD], backward_s=[BACKWARD, 3 * BACKWARD])
    played = simulate(PipelineShape("1f1b", 2, 1), times, microbatches=MICROBATCHES)
    assert [worked for _, worked in by_rank] == list(played.busy_s)
    assert max(ended for ended, _ in by_rank) == played.wall_s
    assert played.bubble > PipelineShape("1f1b", 2, 1).bubble(MICROBATCHES) + 0.1


def _measured(count: int) -> Bubble:
    rows = torch.zeros(8, WIDTH)
    return measure_bubble(counted_parts(Clock(), count, [1.0] * count, {}), rows, rows, steps=3)


def test_measured_work_fits_into_the_measured_step(ranks: Ranks) -> None:
    for found in ranks.run(2, _measured, 2):
        assert found.expected == PipelineShape("1f1b", 2, 1).bubble(MICROBATCHES)
        assert 0 <= found.measured < 1
        assert 0 <= found.played < 1
        assert all(0 < busy_s <= found.wall_s for busy_s in found.busy_s)
