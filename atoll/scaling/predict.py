"""Predictions of a fitted law, with an interval that grows beyond the runs it was fitted to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError, unknown
from atoll.scaling.fit import SEED, Fit
from atoll.scaling.laws import Law, arrays, log_terms
from atoll.scaling.points import VARIABLES

Array = NDArray[np.float64]

FAR = 10.0
"""Times the largest run, beyond which a prediction is called an extrapolation."""

SHARE = 0.9
"""Of the interval."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted loss."""

    loss: float
    low: float
    high: float
    """Ends of the interval in which a run ends with a chance of `SHARE`."""
    at: dict[str, float]
    """The variables of the law."""
    beyond: dict[str, float]
    """Variable -> how many times above the largest run, or below the smallest; without those
    within the runs."""
    notes: tuple[str, ...]
    """What the interval rests on, and what it does not cover."""


def predict(fit: Fit, at: Mapping[str, float]) -> Prediction:
    """Return the loss at some settings.

    The interval is of one run: the law's constants and the residual are drawn anew. Beyond the
    largest run it is widened by the error with which the largest size was predicted from the
    others, in proportion to the distance (in logarithms); and beyond 10 times also by its own
    width per decade.

    Args:
        fit: The law.
        at: A value for each variable of the law; others are ignored if the law has no use for them.

    Raises:
        ConfigError: a variable is missing, unknown, or not a positive number.
    """
    settings = check_settings(fit, at)
    centre = float(log_losses(fit.law, arrays(fit.theta), settings))
    low, high = np.quantile(_drawn(fit, settings), [(1 - SHARE) / 2, (1 + SHARE) / 2])
    below, above = max(0.0, centre - float(low)), max(0.0, float(high) - centre)
    beyond = _beyond(fit, settings)
    factor = max((beyond.get(name, 1.0) for name in ("params", "tokens")), default=1.0)
    extra = _extra(fit, factor)
    far = 1 + max(0.0, math.log10(max(factor, *beyond.values(), 1.0) / FAR))
    below, above = (far * math.hypot(side, extra) for side in (below, above))
    return Prediction(
        loss=math.exp(centre), low=math.exp(centre - below), high=math.exp(centre + above),
        at=settings, beyond=beyond, notes=tuple(_notes(fit, beyond, at)),
    )  # fmt: skip


def check_settings(fit: Fit, at: Mapping[str, float]) -> dict[str, float]:
    """Return the values of the law's own variables.

    Raises:
        ConfigError: one is missing, unknown, or not a positive number.
    """
    for name, value in at.items():
        if name not in VARIABLES:
            raise unknown("variable of a scaling law", name, VARIABLES)
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(
                f"{name} must be a positive number", given=value, remedy=f"e.g. {name}=1e6"
            )
    missing = [name for name in fit.law.variables if name not in at]
    if missing:
        raise ConfigError(
            f"{fit.law.title} needs a value for {', '.join(missing)}",
            given=", ".join(f"{name}={value:g}" for name, value in at.items()) or "nothing",
            expected=", ".join(f"{name}=NUMBER" for name in fit.law.variables),
        )
    return {name: float(at[name]) for name in fit.law.variables}


def log_losses(law: Law, theta: Mapping[str, Array], at: Mapping[str, float]) -> Array:
    """Return ln of the loss, for one or many values of each constant.

    Args:
        law: The law.
        theta: ln of each constant and each exponent, all of the same shape.
        at: The variables.
    """
    values = {name: np.log(np.float64(value)) for name, value in at.items()}
    found: Array = np.logaddexp.reduce(log_terms(law, theta, values), axis=0)
    return found


def _drawn(fit: Fit, at: Mapping[str, float]) -> Array:
    """Return ln of the losses of single runs, by the resampled laws."""
    law = log_losses(fit.law, arrays(fit.samples), at)
    draw = np.random.default_rng(SEED)
    found: Array = law + draw.choice(np.array(fit.residuals), len(law))
    return found


def _beyond(fit: Fit, at: Mapping[str, float]) -> dict[str, float]:
    """Return how far each variable is outside of the runs, as a factor above 1."""
    found = {}
    for name, value in at.items():
        low, high = fit.ranges[name]
        factor = max(value / high, low / value)
        if factor > 1 + 1e-9:
            found[name] = factor
    return found


def _extra(fit: Fit, factor: float) -> float:
    """Return the error to expect at a distance from the runs, in ln of the loss."""
    if factor <= 1 or fit.held_out is None:
        return 0.0
    seen = math.log1p(fit.held_out.worst_error)
    return seen * math.log(factor) / math.log(fit.held_out.ratio)


def _notes(fit: Fit, beyond: Mapping[str, float], settings: Mapping[str, float]) -> Iterator[str]:
    """Yield the limits of a prediction, in words."""
    for name, factor in beyond.items():
        low, high = fit.ranges[name]
        text = f"{name} is {factor:.3g} x outside of the runs ({low:g} to {high:g})"
        if factor > FAR:
            text += ": an extrapolation beyond 10 x, the interval is widened"
        yield text
    if beyond and fit.held_out is None:
        yield f"nothing was held out to check it by ({fit.held_out_note})"
    for name in sorted(set(settings) - set(fit.law.variables)):
        low, high = fit.ranges[name]
        if low == high != settings[name]:
            yield f"all runs had {name} = {low:g}: the law knows of no other"
        elif low != high:
            yield f"{name} is not in the law: it makes no difference here"


def prediction_for(fit: Fit, at: Mapping[str, float]) -> Prediction:
    """Return a prediction where members and every may be left out: the largest of the runs'."""
    rest = {
        name: fit.ranges[name][1]
        for name in fit.law.variables
        if name in ("members", "every") and name not in at
    }
    return predict(fit, {**rest, **at})
