"""Orders of a pipeline's work: closed forms against what ranks do, and torch's own."""

from __future__ import annotations

import math
import time
from collections import deque
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.errors import ConfigError
from atoll.strategies.inner.options import PipelineShape, Work, check_microbatches, microbatches_of
from atoll.strategies.inner.pipeline.opportunistic import Arrivals
from atoll.strategies.inner.pipeline.order import next_pass
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.timing import WatchedStage
from tests.island.pipeline.kit import ROWS, pipeline
from tests.island.pool import Ranks
from tests.island.reference import batch_for, gpt, gradients
from tests.patience import PATIENCE_S

SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)]
ANY = [*SHAPES, ("opportunistic", 1)]


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
@pytest.mark.every(3)
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
    st.sampled_from(ANY), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0, 0, 2, 3, 4])
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


# ------------------------------------------------------------------------- opportunistic order


def _ahead(words: dict[str, Any], *, slow: bool) -> tuple[list[Work], dict[str, Tensor], list[int]]:
    """Return a rank's order of passes, its gradients and the most inputs that it kept.

    The last rank waits with its first backward pass until it has the inputs of four forward passes:
    with 1f1b they would never come.
    """
    seen: list[Arrivals] = []
    made, backward = Arrivals.__init__, WatchedStage.backward_one_chunk

    def note(arrivals: Arrivals) -> None:
        made(arrivals)
        seen.append(arrivals)

    def late(stage: WatchedStage, microbatch: int, *args: Any, **options: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while slow and stage.is_last and microbatch == 0 and Work(True, 1, 3) not in seen[-1].here:
            assert time.monotonic() < deadline, "the first rank does not go ahead"
            time.sleep(0.001)
        return backward(stage, microbatch, *args, **options)

    torch.manual_seed(5)
    parts = pipeline(gpt(layers=5), words.pop("axes"), microbatches=8, **words)
    with (
        patch.object(Arrivals, "__init__", note),
        patch.object(WatchedStage, "backward_one_chunk", late),
    ):
        for seed in range(2):
            parts.backward(*batch_for(gpt(), rows=16, seed=seed))
    (schedule,) = parts._schedules.values()
    done = list(getattr(schedule, "done", []))
    return done, gradients(parts), [parts.watch.most_held]


@pytest.mark.parametrize("axes", [{"pipeline": 2}, {"replicate": 2, "pipeline": 2}])
@pytest.mark.every(2)
def test_ready_passes_go_first_and_gradients_stay_bitwise(
    ranks: Ranks, axes: dict[str, int]
) -> None:
    count = math.prod(axes.values())
    plain = ranks.run(count, partial(_ahead, slow=False), {"axes": axes, "schedule": "1f1b"})
    words = {"axes": axes, "schedule": "opportunistic"}
    found = ranks.run(count, partial(_ahead, slow=True), words)
    shape = PipelineShape("opportunistic", 2)
    for rank, ((done, gradient, held), (_, expected, _)) in enumerate(
        zip(found, plain, strict=True)
    ):
        assert gradient.keys() == expected.keys()
        assert all(torch.equal(gradient[name], expected[name]) for name in expected)
        assert held[0] <= shape.held(rank % 2, microbatches=8)
        order = shape.order(rank % 2, microbatches=8)
        assert sorted(done, key=order.index) == order, "every pass once"
        for forward in (True, False):
            assert [w.microbatch for w in done if w.forward == forward] == list(range(8))
    assert [work.forward for work in found[0][0][:4]] == [True] * 4
    assert found[0][0] != shape.order(0, microbatches=8)


@pytest.mark.parametrize(
    ("ready", "held", "expected"),
    [
        ({(True, 1), (False, 0)}, 1, (False, 0)),  # as scheduled
        ({(True, 1)}, 1, (True, 1)),
        ({(True, 1)}, 2, None),  # no more may be kept
        ({(True, 2), (False, 1)}, 1, None),  # passes of a kind keep their order
        (set(), 0, None),
    ],
)
def test_next_pass_is_the_scheduled_or_one_of_the_other_kind(
    ready: set[tuple[bool, int]], held: int, expected: tuple[bool, int] | None
) -> None:
    left = [Work(f, 0, m) for f, m in ((False, 0), (True, 1), (False, 1), (True, 2), (False, 2))]
    able = {Work(forward, 0, microbatch) for forward, microbatch in ready}
    found = next_pass(left, ready=able, held=held, most=2)
    assert found == (Work(expected[0], 0, expected[1]) if expected else None)


class Transfer:
    """One that arrives, or that fails."""

    def __init__(self, *, lost: bool) -> None:
        self._lost = lost

    def wait(self) -> None:
        if self._lost:
            raise RuntimeError("Connection closed by peer")


def test_a_lost_neighbour_is_raised_where_its_tensor_is_awaited() -> None:
    passes = [Work(True, 1, 0), Work(True, 1, 1)]
    arrivals, left = Arrivals(), deque(passes)
    arrivals.expect([(passes[0], [Transfer(lost=False)]), (passes[1], [Transfer(lost=True)])])
    assert arrivals.next(left, held=0, most=1) == passes[0]
    with pytest.raises(RuntimeError, match="closed by peer"):
        arrivals.next(left, held=0, most=1)
