"""Predictions, their intervals, and the best size for a budget."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError, FitError, TooFewPoints
from atoll.scaling.fit import Fit, fit
from atoll.scaling.laws import arrays
from atoll.scaling.optimum import compute_optimal
from atoll.scaling.points import Point
from atoll.scaling.predict import log_losses, predict, prediction_for
from atoll.scaling.rates import fit_rate
from tests.scaling.worlds import loss_of, world
from tests.tiers import examples


@cache
def exact() -> Fit:
    """Return the fit of runs without noise."""
    return fit(world(), resamples=20)


@cache
def noisy() -> Fit:
    """Return the fit of runs with noise, members and rounds."""
    points = world(members=(1, 4), every=(10, 40), m=0.01, h=0.02, noise=0.003)
    return fit(points, shape="whole", resamples=60)


sizes = st.floats(1e6, 1e12)


@settings(max_examples=examples(25), deadline=None)
@given(params=sizes, tokens=sizes, factor=st.floats(1.01, 100))
def test_the_loss_falls_with_size_and_with_data(
    params: float, tokens: float, factor: float
) -> None:
    for found, more in ((exact(), {}), (noisy(), {"members": 2.0, "every": 20.0})):
        here = predict(found, {"params": params, "tokens": tokens, **more})
        larger = predict(found, {"params": params * factor, "tokens": tokens, **more})
        longer = predict(found, {"params": params, "tokens": tokens * factor, **more})
        assert larger.loss < here.loss
        assert longer.loss < here.loss
        assert here.low <= here.loss <= here.high


def test_the_interval_widens_beyond_the_runs_and_says_so() -> None:
    widths = []
    for factor in (1, 3, 9, 30, 300):
        found = predict(
            noisy(), {"params": 1e9 * factor, "tokens": 2e10, "members": 4, "every": 40}
        )
        widths.append(math.log(found.high / found.low))
        said = " ".join(found.notes)
        assert ("outside of the runs" in said) == (factor > 1)
        assert ("beyond 10 x" in said) == (factor > 10)
        assert found.beyond == ({"params": pytest.approx(factor)} if factor > 1 else {})
    assert widths == sorted(widths)
    assert widths[-1] > 3 * widths[0]


def test_most_runs_that_were_not_fitted_are_in_the_interval() -> None:
    found = fit(world(noise=0.004, seed=1, tokens=(1e9, 3e9, 1e10, 3e10)), resamples=100)
    fresh = world(noise=0.004, seed=2, sizes=np.geomspace(1e7, 1e9, 10).tolist())
    inside = 0
    for point in fresh:
        one = predict(found, {"params": point.params, "tokens": point.tokens})
        inside += one.low <= point.loss <= one.high
    assert inside >= 0.75 * len(fresh)


def test_what_the_law_needs_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"L\(N, D\) needs a value for tokens.*params=NUMBER"):
        predict(exact(), {"params": 1e6})
    with pytest.raises(ConfigError, match=r"unknown variable.*'parms'.*did you mean 'params'"):
        predict(exact(), {"parms": 1e6})
    with pytest.raises(ConfigError, match="tokens must be a positive number"):
        predict(exact(), {"params": 1e6, "tokens": -1})


def test_members_and_rounds_are_taken_from_the_runs_if_not_given() -> None:
    found = prediction_for(noisy(), {"params": 1e8, "tokens": 1e9})
    assert found.at == {"params": 1e8, "tokens": 1e9, "members": 4.0, "every": 40.0}
    other = predict(exact(), {"params": 1e8, "tokens": 1e9, "members": 8})
    assert other.notes == ("all runs had members = 1: the law knows of no other",)


@settings(max_examples=examples(12), deadline=None)
@given(budget=st.floats(1e17, 1e25))
def test_the_best_size_is_the_numeric_minimum(budget: float) -> None:
    for found, more in ((exact(), {}), (noisy(), {"members": 4.0, "every": 40.0})):
        best = compute_optimal(found, budget, **more)
        assert 6 * best.params * best.tokens == pytest.approx(budget, rel=1e-9)
        low, high = math.log(best.params) - 3, math.log(best.params) + 3
        theta = arrays(found.theta)
        for _ in range(60):  # golden section
            left, right = high - 0.618034 * (high - low), low + 0.618034 * (high - low)
            at = [
                {"params": math.exp(x), "tokens": budget / 6 / math.exp(x)} for x in (left, right)
            ]
            losses = [log_losses(found.law, theta, {**one, **more}) for one in at]
            low, high = (left, high) if losses[0] > losses[1] else (low, right)
        assert math.log(best.params) == pytest.approx((low + high) / 2, abs=1e-3)
        assert best.params_interval[0] <= best.params * 1.0001
        assert best.params_interval[1] >= best.params * 0.9999


def test_members_that_cost_data_move_the_best_size() -> None:
    points = [
        dataclasses.replace(p, loss=loss_of(p.params, p.tokens / p.members**0.5))
        for p in world(members=(1, 4))
    ]
    found = fit(points, resamples=20)
    assert found.law.shape == "tokens"
    one, four = (compute_optimal(found, 1e20, members=k) for k in (1, 4))
    assert four.params < one.params
    assert four.prediction.loss > one.prediction.loss


def test_the_known_refit_gives_eighteen_tokens_per_parameter() -> None:
    best = compute_optimal(exact(), 5.76e23)
    assert best.tokens_per_parameter == pytest.approx(18.3, rel=0.05)
    assert "x that of the largest run" in best.notes[0]


def test_a_best_size_without_bounds_has_an_open_interval() -> None:
    flat = {**exact().samples, "a": [1e-4, 0.3] * 10, "b": [1e-4, 0.3] * 10}
    flat["A"] = [50.0, 1.0] * 10
    found = compute_optimal(dataclasses.replace(exact(), samples=flat), 1e20)
    assert found.params_interval[1] == math.inf
    assert found.tokens_interval[0] == 0.0


def test_a_budget_needs_a_law_of_both() -> None:
    one = fit([p for p in world() if p.tokens == 1e9], resamples=5)
    with pytest.raises(FitError, match=r"needs a law of params and tokens.*L\(N\)"):
        compute_optimal(one, 1e20)
    with pytest.raises(ConfigError, match="budget"):
        compute_optimal(exact(), float("nan"))


def hyper(name: str, best: float, *, n: float, k: float = 1.0) -> list[Point]:
    """Return runs whose loss is a parabola around the best value."""
    return [
        Point(params=n, tokens=1e9, members=k, loss=3 + 0.1 * math.log(x / best) ** 2, **{name: x})
        for x in np.geomspace(best / 9, best * 7, 8).tolist()
    ]


def test_the_best_batch_as_a_power_of_size_and_members() -> None:
    points = [
        one
        for n in (1e6, 1e7, 1e8)
        for k in (1, 2)
        for one in hyper("batch", 2 * n**0.3 * k**0.2, n=n, k=k)
    ]
    law = fit_rate(points, "batch")
    assert (law.factor, law.a, law.m) == pytest.approx((2, 0.3, 0.2), rel=0.01)
    assert law.at(params=1e9, members=4) == pytest.approx(2 * 1e9**0.3 * 4**0.2, rel=0.01)


def test_an_outer_rate_that_ignores_the_size_has_no_exponent() -> None:
    points = [one for n in (1e6, 1e8) for one in hyper("outer_lr", 0.7, n=n)]
    law = fit_rate(points, "outer_lr")
    assert law.a == pytest.approx(0, abs=1e-6)
    assert law.at(params=1e9) == pytest.approx(0.7, rel=0.01)


def test_a_best_value_at_the_edge_is_no_best_value() -> None:
    edge = [p for p in hyper("lr", 1e-3, n=1e6) if p.lr < 1e-3] + hyper("lr", 1e-3, n=1e7)
    with pytest.raises(TooFewPoints, match=r"1 sizes.*N = 1e\+06.*no best lr between others"):
        fit_rate(edge, "lr")
