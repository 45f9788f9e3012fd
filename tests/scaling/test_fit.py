"""Known laws are found again, and bad runs are refused by name."""

from __future__ import annotations

import dataclasses
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import (
    ConfigError,
    OneValueOnly,
    PointNotFinite,
    RunsContradict,
    TooFewPoints,
)
from atoll.scaling.fit import fit, predicted_losses
from atoll.scaling.laws import laws_of
from atoll.scaling.points import Point
from tests.scaling.worlds import A, B, E, a, b, changed, world

FEW = 20
"""Resampled fits, where intervals are not the point."""


def test_constants_of_size_and_data_are_found_to_one_percent() -> None:
    found = fit(world(), resamples=FEW)
    assert found.law.equation == "E + A / N^a + B / D^b"
    assert found.constants() == pytest.approx({"E": E, "A": A, "B": B, "a": a, "b": b}, rel=0.01)
    assert found.held_out is not None
    assert found.held_out.worst_error < 1e-3


@pytest.mark.long("tests/scaling/test_fit.py::test_the_joint_law_of_size_and_members_is_found")
def test_constants_of_members_and_rounds_are_found_too() -> None:
    points = world(sizes=(1e7, 5e7, 2e8), members=(1, 4), every=(10, 40), m=0.0116, h=0.02)
    found = fit(points, resamples=FEW)
    assert found.law.shape == "whole"
    known = {"E": E, "A": A, "B": B, "a": a, "b": b, "m": 0.0116, "h": 0.02}
    assert found.constants() == pytest.approx(known, rel=0.01)


def test_the_joint_law_of_size_and_members_is_found() -> None:
    points = [
        Point(params=n, tokens=20 * n, members=k, loss=19.226 * n**-0.0985 * k**0.0116)
        for n in (35e6, 90e6, 330e6, 1.3e9)
        for k in (1, 2, 8)
    ]
    found = fit(points, resamples=FEW)
    assert found.law.variables == ("params", "members")
    assert "tokens rise with params" in found.notes[0]
    assert found.law.shape == "power"
    assert found.constants() == pytest.approx({"A": 19.226, "a": 0.0985, "m": 0.0116}, rel=0.01)


@pytest.mark.parametrize("variable", ["params", "tokens"])
@pytest.mark.every(2)
def test_a_law_of_one_variable_is_found(variable: str) -> None:
    values = (1e6, 4e6, 3e7, 2e8, 1e9)
    base = Point(params=1e6, tokens=1e9, loss=1.0)
    points = [changed(changed(base, variable, x), "loss", 1.5 + 60.0 / x**0.25) for x in values]
    found = fit(points, resamples=FEW)
    assert found.law.variables == (variable,)
    exponent = "a" if variable == "params" else "b"
    assert found.constants()["E"] == pytest.approx(1.5, rel=0.01)
    assert found.constants()[exponent] == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("shape", ["bent", "beside"])
@pytest.mark.every(2)
def test_other_shapes_of_members_are_distinguished(shape: str) -> None:
    law = next(one for one in laws_of(("params", "members")) if one.shape == shape)
    theta = {"E": 0.2, "A": 4.0, "a": 0.25, "m": 0.004}
    theta |= {"B": -3.0, "m": 0.6} if shape == "beside" else {}
    grid = [
        Point(params=n, tokens=1.0, members=k, loss=1.0)
        for n in (1e6, 8e6, 6e7, 5e8)
        for k in (1, 2, 4, 8)
    ]
    losses = predicted_losses(law, theta, grid)
    points = [dataclasses.replace(p, loss=float(x)) for p, x in zip(grid, losses, strict=True)]
    found = fit(points, resamples=FEW)
    assert found.law.shape == shape
    assert found.theta == pytest.approx(theta, rel=0.01)


@pytest.mark.long("tests/scaling/test_fit.py::test_intervals_grow_with_the_noise")
def test_nine_of_ten_intervals_hold_the_truth() -> None:
    held = 0
    for seed in range(6):
        found = fit(world(noise=0.003, seed=seed), shape="sum", resamples=60)
        for name, true in {"E": E, "a": a, "b": b}.items():
            low, high = found.interval(name)
            held += low <= true <= high
    assert held >= 15


def test_intervals_grow_with_the_noise() -> None:
    little, much = (fit(world(noise=x), shape="sum", resamples=60) for x in (0.001, 0.004))
    for name in ("E", "a", "b"):
        narrow, wide = little.interval(name), much.interval(name)
        assert narrow[1] - narrow[0] < wide[1] - wide[0]
    assert 0 < little.score < much.score


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_order_of_the_runs_changes_nothing(seed: int) -> None:
    points = world(noise=0.002)
    shuffled = random.Random(seed).sample(points, len(points))
    assert fit(shuffled, resamples=FEW).theta == fit(points, resamples=FEW).theta


@settings(max_examples=2, deadline=None)
@given(loss=st.floats(0.1, 10), size=st.floats(1e-3, 1e3), data=st.floats(1e-3, 1e3))
def test_other_units_change_only_the_factors(loss: float, size: float, data: float) -> None:
    law = ("params", "tokens")
    points = world(noise=0.002)
    scaled = [
        dataclasses.replace(p, params=p.params * size, tokens=p.tokens * data, loss=p.loss * loss)
        for p in points
    ]
    before = fit(points, variables=law, resamples=1).constants()
    after = fit(scaled, variables=law, resamples=1).constants()
    assert after["a"] == pytest.approx(before["a"], rel=1e-3)
    assert after["b"] == pytest.approx(before["b"], rel=1e-3)
    assert after["E"] == pytest.approx(before["E"] * loss, rel=1e-3)
    assert after["A"] == pytest.approx(before["A"] * loss * size ** before["a"], rel=1e-2)


def test_of_different_learning_rates_the_best_counts() -> None:
    good = world()
    worse = [dataclasses.replace(p, loss=p.loss * 1.5, lr=3.0) for p in good]
    found = fit([*good, *worse], resamples=FEW)
    assert len(found.points) == len(good)
    assert found.constants()["E"] == pytest.approx(E, rel=0.01)
    assert "12 runs with a worse batch or learning rate" in found.notes[0]


@pytest.mark.parametrize("field", ["loss", "params", "tokens", "members"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_value_that_is_no_number_is_refused_by_name(field: str, value: float) -> None:
    points = world()
    points[3] = changed(points[3], field, value)
    with pytest.raises(
        PointNotFinite, match=f"{field} is not a positive number.*{re.escape(points[3].name)}"
    ):
        fit(points)


def test_one_size_only_is_refused_by_name() -> None:
    with pytest.raises(OneValueOnly, match=r"params.*1e\+07.*at least 3.*add runs"):
        fit(world(sizes=(1e7,)), variables=("params", "tokens"))


def test_too_few_runs_are_refused_with_their_number() -> None:
    diagonal = world()[:1] + world()[4:5] + world()[8:9]
    with pytest.raises(TooFewPoints, match=r"3 runs, 5 constants.*at least 6 runs"):
        fit(diagonal, variables=("params", "tokens"))
    with pytest.raises(OneValueOnly, match="params"):
        fit(world()[:1])


def test_equal_runs_that_differ_are_refused_by_their_names() -> None:
    points = world()
    odd = dataclasses.replace(points[0], loss=points[0].loss * 1.3, name="odd")
    with pytest.raises(RunsContradict, match=rf"{re.escape(points[0].name)}.*odd"):
        fit([*points, odd])


def test_a_loss_that_rises_with_the_data_is_refused() -> None:
    points = world()
    upside_down = [dataclasses.replace(p, loss=6.0 - p.loss) for p in points]
    with pytest.raises(RunsContradict, match="does not fall with"):
        fit(upside_down)


def test_unknown_variables_and_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="width"):
        fit(world(), variables=("params", "width"))
    with pytest.raises(ConfigError, match="members"):
        fit(world(), variables=("members",))
    with pytest.raises(ConfigError, match=r"unknown shape of L\(N, D\).*'sun'.*did you mean 'sum'"):
        fit(world(), shape="sun")


def test_runs_that_do_not_tell_the_floor_say_so() -> None:
    steep = [changed(p, "loss", 20.0 / p.params**0.1 + 40.0 / p.tokens**0.15) for p in world()]
    assert "E cannot be distinguished from 0" in fit(steep, resamples=FEW).notes[-1]
    assert fit(world(), resamples=FEW).notes == ()


def test_without_a_third_size_nothing_can_be_held_out() -> None:
    found = fit(world(sizes=SMALL), resamples=FEW)
    assert found.held_out is None
    assert "without the largest params: at least 3" in found.held_out_note


SMALL = (1e7, 5e7, 2e8)
