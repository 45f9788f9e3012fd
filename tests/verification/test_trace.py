"""What is compared, and where two lists of digests begin to differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.task import Task
from atoll.verification.trace import first_difference, mark_positions, planned_steps


@given(st.integers(1, 500), st.integers(1, 9))
def test_marks_ascend_and_end_with_the_last_step(steps: int, marks: int) -> None:
    found = mark_positions(steps, marks=marks)
    assert list(found) == sorted(set(found))
    assert found[-1] == steps
    assert found[0] >= 1
    assert len(found) <= marks


@given(st.lists(st.booleans(), min_size=0, max_size=40))
def test_bisection_ends_between_equal_and_different(middle: list[bool]) -> None:
    one = [str(i) for i in range(len(middle) + 2)]
    other = [one[0], *(d if same else "x" for d, same in zip(one[1:-1], middle, strict=True)), "y"]
    at = first_difference(one, other)
    assert one[at] != other[at]
    assert one[at - 1] == other[at - 1]


@given(st.integers(1, 300), st.integers(1, 300))
def test_bisection_finds_the_first_of_one_change(length: int, at: int) -> None:
    first = min(at, length)
    one = [str(i) for i in range(length + 1)]
    other = one[:first] + ["x"] * (length + 1 - first)
    assert first_difference(one, other) == first


@pytest.mark.parametrize(
    ("one", "other"),
    [(["a", "b"], ["x", "c"]), (["a", "b"], ["a", "b"]), (["a"], ["a"]), (["a", "b"], ["a"])],
)
def test_what_is_no_dispute_is_refused(one: list[str], other: list[str]) -> None:
    with pytest.raises(ValueError, match="agrees at its start"):
        first_difference(one, other)


@given(st.integers(1, 200), st.floats(0.01, 1.0))
def test_planned_steps_are_those_of_the_trainer(length: int, pace: float) -> None:
    import torch

    model = torch.nn.Linear(1, 1)
    task = Task(model, torch.optim.SGD(model.parameters(), lr=0.1), paced=True, pace=pace)
    task.begin_period(length)
    assert task.period.planned == planned_steps(length, pace)
