"""Losses of steps that several members computed: each row counts once, whoever was killed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.netlab.curve import curve_of


def point(process: str, step: int, *, rows: int, loss: float, time: float = 0.0) -> dict[str, Any]:
    values = {"stage": 1.0, "rows": float(rows), "loss": loss} if rows else {"stage": 1.0}
    return {"incarnation": process, "step": step, "time": time, "values": values}


def test_a_step_is_the_mean_of_all_rows() -> None:
    points = [point("a", 1, rows=4, loss=1.0), point("b", 1, rows=8, loss=4.0)]
    other_stage = {**point("c", 1, rows=12, loss=9.0), "values": {"stage": 0.0}}
    found = curve_of([*points, other_stage], stages=2, batch=12)
    assert found == {range(1, 2): pytest.approx(3.0)}


def test_quick_steps_share_a_mean_until_all_have_reported() -> None:
    """One process reports steps 1, 2 and 4, the other one 1, 3 and 4."""
    points = [point(process, 1, rows=6, loss=9.0) for process in "ab"]
    points += [
        point("a", 2, rows=6, loss=1.0), point("b", 3, rows=12, loss=2.0),
        point("a", 4, rows=12, loss=3.0), point("b", 4, rows=6, loss=4.0),
    ]  # fmt: skip
    found = curve_of(points, stages=2, batch=12)
    mean = pytest.approx((6 + 24 + 36 + 24) / 36)
    assert found == {range(1, 2): 9.0, range(2, 5): mean}


def test_steps_that_were_trained_again_count_once() -> None:
    """Killed after step 5, when step 3 was saved: steps 4 and 5 were reported twice."""
    before = [point("a", step, rows=12, loss=float(step), time=step) for step in range(1, 6)]
    after = [point("b", step, rows=12, loss=10.0 * step, time=step + 10) for step in range(4, 7)]
    found = curve_of([*before, *after], stages=2, batch=12, saved=3, killed=10.0)
    losses = {step: loss for steps, loss in found.items() for step in steps}
    assert losses == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: 50.0, 6: 60.0}


def test_a_step_with_rows_that_nobody_reported_is_left_out() -> None:
    """A killed member has reported step 1, and not its part of step 2."""
    points = [point("a", step, rows=6, loss=1.0) for step in (1, 2)]
    points += [point("b", 1, rows=6, loss=1.0), point("a", 3, rows=12, loss=1.0)]
    assert set(curve_of(points, stages=2, batch=12)) == {range(1, 2), range(3, 4)}
