"""The loss that a run ends with, and the hours to a loss: by a fitted scaling law, or not at all.

A law of runs with members or intervals counts them itself. A law without them knows tokens only:
then the tokens are those that data parallel would need for the same progress (efficiency.py), and
the interval is that of the law and of that worth together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from atoll.errors import ConfigError
from atoll.forecast.predict import Forecast
from atoll.forecast.workload import Workload
from atoll.scaling.fit import Fit
from atoll.scaling.predict import Prediction, predict

HOUR_S = 3600.0
LONGEST_HOURS = 24.0 * 365 * 10


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A predicted loss after some hours."""

    loss: float
    low: float
    high: float
    hours: float
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Duration:
    """Hours until a loss; inf: it is not reached in ten years by this law."""

    hours: float
    low: float
    high: float


def loss_after(fit: Fit, workload: Workload, forecast: Forecast, *, hours: float) -> Loss:
    """Return the loss after some hours.

    Raises:
        ConfigError: the law needs a variable that this job does not have.
    """
    low, middle, high = _tokens(fit, forecast, seconds=hours * HOUR_S)
    found = _at(fit, workload, forecast, middle)
    best, worst = _at(fit, workload, forecast, high), _at(fit, workload, forecast, low)
    return Loss(
        loss=found.loss, low=min(found.low, best.low), high=max(found.high, worst.high),
        hours=hours, notes=found.notes,
    )  # fmt: skip


def hours_to(fit: Fit, workload: Workload, forecast: Forecast, *, target: float) -> Duration:
    """Return the hours until a loss is reached, with the ends of the interval."""

    def reached(hours: float, which: str) -> bool:
        return bool(getattr(loss_after(fit, workload, forecast, hours=hours), which) <= target)

    return Duration(
        hours=_first(lambda h: reached(h, "loss")), low=_first(lambda h: reached(h, "low")),
        high=_first(lambda h: reached(h, "high")),
    )  # fmt: skip


def _tokens(fit: Fit, forecast: Forecast, *, seconds: float) -> tuple[float, float, float]:
    """Return the tokens that the law counts: all of them if it knows what members cost."""
    if "members" in fit.law.variables:
        return (forecast.tokens_per_s * seconds,) * 3
    low, middle, high = forecast.worth_per_s
    return low * seconds, middle * seconds, high * seconds


def _at(fit: Fit, workload: Workload, forecast: Forecast, tokens: float) -> Prediction:
    known = {
        "params": float(workload.parameters), "tokens": max(1.0, tokens),
        "members": float(len(forecast.candidate.members)),
        "every": 1.0 if math.isinf(forecast.every) else max(1.0, forecast.every),
    }  # fmt: skip
    missing = [name for name in fit.law.variables if name not in known]
    if missing:
        raise ConfigError("the law needs what a job does not have", given=", ".join(missing))
    return predict(fit, {name: known[name] for name in fit.law.variables})


def _first(reached: Callable[[float], bool]) -> float:
    """Return the first hour at which it is so, within a hundredth, by halving."""
    if not reached(LONGEST_HOURS):
        return math.inf
    low, high = 1e-6, LONGEST_HOURS
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
