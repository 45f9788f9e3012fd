"""The time in which a rank of a real pipeline has nothing to do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.strategies.inner.options import PipelineShape
from atoll.strategies.inner.pipeline.bubble import Bubble, measure_bubble
from tests.island.pipeline.kit import pipeline
from tests.island.pool import Ranks
from tests.island.reference import Perceptron

FORWARD_S, BACKWARD_S = 0.01, 0.02
WIDTH = 3


class _Waited(torch.autograd.Function):
    """Takes time, and no core: so ranks that share cores do not slow each other down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float) -> Tensor:
        ctx.share = share
        time.sleep(FORWARD_S * share)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S * ctx.share)
        return gradient.clone(), None


class _Waits(nn.Module):
    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Waited.apply(x * self.scale, self.share)  # type: ignore[no-untyped-call]
        return found


def _measured(count: int, shares: list[float], words: dict[str, Any]) -> Bubble:
    parts = pipeline(
        Perceptron(*(_Waits(share) for share in shares)),
        {"pipeline": count},
        cuts=tuple(range(1, len(shares))),
        **words,
    )
    rows = torch.ones(8, WIDTH)
    return measure_bubble(parts, rows, rows, steps=3)


CASES = [
    (2, 1, {"schedule": "gpipe", "microbatches": 4}),
    (2, 1, {"schedule": "1f1b", "microbatches": 4}),
    (2, 2, {"schedule": "interleaved", "chunks": 2, "microbatches": 4}),
    (4, 1, {"schedule": "1f1b", "microbatches": 4}),
]


@pytest.mark.parametrize(("count", "chunks", "words"), CASES)
def test_bubbles_are_those_of_the_closed_form(
    ranks: Ranks, count: int, chunks: int, words: dict[str, Any]
) -> None:
    shape = PipelineShape(words["schedule"], count, chunks)
    shares = [1.0 / chunks] * shape.stages
    for found in ranks.run(count, _measured, count, shares, words):
        assert found.expected == shape.bubble(4)
        assert found.played == pytest.approx(found.expected, abs=0.08)
        assert found.expected - 0.03 < found.measured < found.expected + 0.15
        least = 4 * (FORWARD_S + BACKWARD_S)
        assert all(least <= busy_s <= found.wall_s for busy_s in found.busy_s)


def test_unlike_stages_explain_a_larger_bubble(ranks: Ranks) -> None:
    for found in ranks.run(2, _measured, 2, [1.0, 3.0], {"microbatches": 4}):
        assert found.played > found.expected + 0.1
        assert found.measured == pytest.approx(found.played, abs=0.1)
