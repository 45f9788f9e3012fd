"""What the hub plans again while a job runs: in verdicts and plans, for those who can use it."""

from __future__ import annotations

import pytest

from atoll.group.aggregation import Aggregation
from tests.rounds.rounds_by_hand import commit_all, join_all, rounds_of

MEMBERS = ["w0", "w1", "w2"]


@pytest.mark.parametrize(("preference", "expected"), [("direct", "tree"), ("relay", "")])
def test_a_collective_comes_with_direct_plans(preference: str, expected: str) -> None:
    machine = rounds_of(3, preference=preference)
    machine.collective = "tree"
    assert join_all(machine, MEMBERS, 1.0).collective == expected


def test_an_interval_comes_with_all_later_verdicts() -> None:
    machine = rounds_of(3)
    intervals = []
    for number in range(3):
        if number == 1:
            machine.commit_log.every = 50
        base = "b" if number == 0 else "d"
        verdict = commit_all(machine, join_all(machine, MEMBERS, 10.0 * number, base), 1.0)
        intervals.append(verdict.every)
    assert intervals == [0, 50, 50]


@pytest.mark.parametrize(
    ("aggregation", "codec", "expected"),
    [
        (Aggregation(), "fp32", "tree"),
        (Aggregation(collective="ring"), "fp32", "tree"),
        (Aggregation(), "int8:256", "auto"),  # partial sums would be rounded at every hop
        (Aggregation(aggregate="median"), "fp32", "auto"),  # every value has to be seen
    ],
)
def test_a_planned_collective_holds_where_sums_can_travel(
    aggregation: Aggregation, codec: str, expected: str
) -> None:
    assert aggregation.planned("tree", codec=codec).collective == expected
    assert aggregation.planned("", codec=codec) == aggregation
