"""Orders of a pipeline's work: closed forms against what ranks do, and torch's own."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.strategies.inner.options import PipelineShape, check_microbatches, microbatches_of
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.timing import WatchedStage
from tests.island.pipeline.kit import ROWS, pipeline
from tests.island.pool import Ranks
from tests.island.reference import batch_for, gpt

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]


def _order(words: dict[str, Any]) -> list[tuple[bool, int, int]]:
    """Return what this rank's stages are told to do."""
    told: list[tuple[bool, int, int]] = []
    passes = {True: WatchedStage.forward_one_chunk, False: WatchedStage.backward_one_chunk}

    def noted(forward: bool) -> Any:
        def do(stage: WatchedStage, microbatch: int, *args: Any, **options: Any) -> Any:
            told.append((forward, stage.stage_index, microbatch))
            return passes[forward](stage, microbatch, *args, **options)

        return do

    parts = pipeline(gpt(layers=5), {"pipeline": 2}, **words)
    with (
        patch.object(WatchedStage, "forward_one_chunk", noted(True)),
        patch.object(WatchedStage, "backward_one_chunk", noted(False)),
    ):
        parts.backward(*batch_for(gpt(), rows=ROWS))
    return told


@pytest.mark.parametrize(("schedule", "chunks"), SHAPES)
def test_orders_are_those_that_torch_follows(ranks: Ranks, schedule: str, chunks: int) -> None:
    shape = PipelineShape(schedule, 2, chunks)
    expected = [
        [(work.forward, work.stage, work.microbatch) for work in shape.order(k, microbatches=4)]
        for k in range(2)
    ]
    words = {"schedule": schedule, "chunks": chunks, "microbatches": 4}
    assert ranks.run(2, _order, words) == expected


def _kept(count: int, words: dict[str, Any]) -> list[int]:
    parts: PipelineParts = pipeline(gpt(layers=5), {"pipeline": count}, **words)
    found = []
    for rows in (8, 16):
        parts.backward(*batch_for(gpt(), rows=rows))
        found.append(parts.watch.most_held)
    return found


@pytest.mark.parametrize(("count", "schedule", "chunks"), [
    (2, "gpipe", 1), (4, "1f1b", 1), (2, "1f1b", 1), (2, "interleaved", 2),
])  # fmt: skip
def test_no_more_inputs_are_kept_than_the_closed_form_says(
    ranks: Ranks, count: int, schedule: str, chunks: int
) -> None:
    shape = PipelineShape(schedule, count, chunks)
    words = {"schedule": schedule, "chunks": chunks, "microbatches": 8}
    found = ranks.run(count, _kept, count, words)
    assert found == [[shape.held(rank, microbatches=8)] * 2 for rank in range(count)]


@given(
    st.sampled_from(SHAPES), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0, 0, 2, 3, 4])
)
def test_automatic_microbatches_fit_wherever_any_do(
    kind: tuple[str, int], count: int, rows: int, wanted: int
) -> None:
    shape = PipelineShape(kind[0], count, kind[1])
    number = microbatches_of(shape, wanted=wanted, rows=rows)
    if wanted:
        assert number == wanted
        return
    assert shape.works_with(number)
    fitting = [m for m in range(1, 2 * count + 1) if rows % m == 0 and shape.works_with(m)]
    assert number == max(fitting) if fitting else rows % number


@pytest.mark.parametrize(
    ("shape", "wanted", "nearest"),
    [
        (PipelineShape("1f1b", 4), 3, 4),
        (PipelineShape("1f1b", 4), 1, 4),
        (PipelineShape("interleaved", 4, 2), 6, 8),
        (PipelineShape("interleaved", 4, 2), 5, 4),
        (PipelineShape("interleaved", 4, 2), 1, 4),
    ],
)
def test_numbers_of_microbatches_without_an_order_are_refused(
    shape: PipelineShape, wanted: int, nearest: int
) -> None:
    with pytest.raises(ConfigError, match=rf"microbatches = {wanted}.*microbatches = {nearest} in"):
        check_microbatches(shape, wanted)
    check_microbatches(shape, nearest)


@pytest.mark.parametrize(
    ("schedule", "chunks", "remedy"),
    [("interleaved", 1, "chunks = 2"), ("1f1b", 2, "chunks = 1"), ("zigzag", 1, "1f1b")],
)
def test_shapes_that_do_not_exist_are_refused(schedule: str, chunks: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        PipelineShape(schedule, 2, chunks)
