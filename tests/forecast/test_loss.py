"""Losses by a fitted law: more hours, less loss; and the hours to a loss are its inverse."""

from __future__ import annotations

import math

import pytest

from atoll.forecast.candidates import Candidate
from atoll.forecast.loss import hours_to, loss_after
from atoll.forecast.predict import Forecast, Planner
from atoll.scaling.fit import Fit, fit
from tests.forecast.worlds import fleet, workload
from tests.scaling.worlds import world

LOAD = workload(50_000_000)


@pytest.fixture(scope="module")
def law() -> Fit:
    return fit(world(), resamples=20)


@pytest.fixture(scope="module")
def forecast() -> Forecast:
    one = Candidate(preset="diloco", members=("m0", "m1"), codec="fp32", options={"every": 50})
    return Planner(LOAD).predict(fleet(0.5, 0.5), one)


def test_a_longer_run_ends_lower_and_the_worth_widens_it(law: Fit, forecast: Forecast) -> None:
    day, week = (loss_after(law, LOAD, forecast, hours=hours) for hours in (24.0, 168.0))
    assert week.loss < day.loss
    assert day.low < day.loss < day.high


def test_the_hours_to_a_loss_end_at_that_loss(law: Fit, forecast: Forecast) -> None:
    target = loss_after(law, LOAD, forecast, hours=100.0).loss
    found = hours_to(law, LOAD, forecast, target=target)
    assert found.hours == pytest.approx(100.0, rel=0.02)
    assert found.low < found.hours < found.high


def test_a_loss_below_the_laws_floor_is_never_reached(law: Fit, forecast: Forecast) -> None:
    assert math.isinf(hours_to(law, LOAD, forecast, target=0.1).hours)
