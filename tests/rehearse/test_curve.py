from __future__ import annotations

import math

import pytest

from atoll.rehearse.compare import Report
from atoll.rehearse.curve import START, Curve, Moment


def line(seconds: float, *, steps_per_s: float = 10.0, rounds: float = 4.0) -> Curve:
    moments = [
        Moment(seconds=seconds * n / 4, steps=steps_per_s * seconds * n / 4, rounds=rounds * n / 4)
        for n in range(1, 5)
    ]
    return Curve((START, *moments))


def report(predicted: Curve, seen: Curve, *, steps: int) -> Report:
    return Report(
        job="j", machines=2, steps=steps, slower=1.0, real=True, predicted=predicted, seen=seen,
        events=(), notes=(),
    )  # fmt: skip


def test_between_two_moments_values_grow_in_proportion() -> None:
    curve = line(100.0)
    assert curve.at(30.0).steps == pytest.approx(300.0)
    assert curve.when(450.0) == pytest.approx(45.0)
    assert curve.until(450.0).end.seconds == pytest.approx(45.0)
    assert curve.at(1e9) == curve.end
    assert math.isinf(curve.when(1001.0))
    assert curve.scaled(0.5).when(450.0) == pytest.approx(22.5)


def test_the_verdict_says_both_times_and_the_difference() -> None:
    close = report(line(190.0), line(204.0, steps_per_s=1900 / 204), steps=1900)
    assert close.verdict() == "predicted 3:10 for 1,900 steps, seen 3:24 (+7%)"
    far = report(line(100.0), line(150.0, steps_per_s=1000 / 150), steps=1000)
    assert far.verdict().endswith("(+50%); as many rounds, each took longer than predicted")


def test_a_rehearsal_that_does_not_end_says_how_far_it_came() -> None:
    stuck = report(line(100.0), line(300.0, steps_per_s=1.0), steps=1000)
    assert not stuck.finished
    assert stuck.verdict() == "predicted 1:40 for 1,000 steps, seen: only 300 in 5:00"
    assert stuck.figures()["error"] is None
