from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atoll.task import Task


def task(**fields: object) -> Task:
    model = nn.Linear(1, 1)
    return Task(model, torch.optim.SGD(model.parameters(), lr=0.1), **fields)  # type: ignore[arg-type]


@settings(deadline=None)
@given(
    start=st.integers(0, 1_000), length=st.integers(1, 500), pace=st.floats(0.0, 1.0),
    last=st.integers(0, 1_500),
)  # fmt: skip
def test_every_pace_reaches_the_round_exactly(
    start: int, length: int, pace: float, last: int
) -> None:
    slow = task(step=start, pace=pace, last=last)
    slow.begin_period(start + length)
    due = min(start + length, last) if last > start else start + length
    steps = [slow.step]
    while slow.step < due:
        slow.advance()
        steps.append(slow.step)
    assert slow.step == due
    assert steps == sorted(steps)
    assert len(steps) - 1 == slow.period.planned == max(1, round(pace * (due - start)))


def test_the_schedule_moves_as_far_as_that_of_a_fast_machine() -> None:
    slow = task(pace=0.25)
    slow.scheduler = torch.optim.lr_scheduler.LambdaLR(
        slow.optimizer, lambda step: 1.0 / (1 + step)
    )
    slow.begin_period(10)
    slow.optimizer.step()
    while slow.step < 10:
        slow.advance()
    assert slow.optimizer.param_groups[0]["lr"] == 0.1 / 11


def test_members_that_compute_the_same_ignore_their_pace() -> None:
    slow = task(pace=0.25)
    slow.begin_period(8, together=True)
    assert slow.period.planned == 8


def test_without_a_period_every_step_counts() -> None:
    one = task(step=5)
    one.free_period()
    for _ in range(3):
        one.advance()
    assert one.step == 8
