"""An interval that the hub sets: taken after the same round by all, kept by states."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.periodic import Average, DiLoCo
from tests.contracts.strategy_suite import batches, start_run

OUTER: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (Average(every=4), [4, 8, 14, 20]),
        (DiLoCo(every=4, shared_steps=0, **OUTER), [4, 8, 14, 20]),
        # Until step 12 the start decides: what the hub says counts from there.
        (Average(every=4, every_step_until=3), [1, 2, 3, 7, 13, 19]),
        (Average(every=4, growing=True), [1, 3, 7, 11, 15, 19]),
    ],
)
def test_the_next_verdict_changes_the_interval(options: Any, expected: list[int]) -> None:
    groups = MemoryGroups(2)
    commits = groups.coordinator.machine.commit_log

    def body(group: Group) -> list[int]:
        run = start_run(options, group, int(group.me[1:]))
        steps = run.train_noting(5)
        commits.every = 6  # all members are past their round of step 4
        return steps + run.train_noting(15)

    for steps in groups.together(body):
        assert steps == expected


def test_a_state_carries_the_interval() -> None:
    groups = MemoryGroups(2)
    groups.coordinator.machine.commit_log.every = 6

    def body(group: Group) -> list[int]:
        run = start_run(Average(every=4), group, int(group.me[1:]))
        run.train(4)
        state = {k: v.clone() for k, v in run.outer.state_dict().items()}
        done = run.task
        again = start_run(Average(every=4), group, 0, model=done.model, begin=False)
        again.task.step, again.task.tokens, again.task.round = done.step, done.tokens, done.round
        again.outer.load_state_dict(state)
        again.stream = batches(int(group.me[1:]), start=4)
        return again.train_noting(14)

    for steps in groups.together(body):
        assert steps == [10, 16]
