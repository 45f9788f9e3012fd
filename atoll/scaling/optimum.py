"""The parameters and tokens that give the least loss for a budget of compute.

Hoffmann et al. 2022, equation 4, with C = 6 N D: at the minimum both terms fall equally fast,
`a A N^-a = b B D^-b`, so that

    N* = G (C / 6)^(b / (a + b)),  D* = (C / 6)^(a / (a + b)) / G,  G = (a A / (b B))^(1 / (a + b)).

Powers of M and H that multiply one term change A or B; those that multiply both change neither N*
nor D*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import ConfigError, FitError
from atoll.scaling.fit import Fit
from atoll.scaling.laws import Law, arrays
from atoll.scaling.predict import FAR, SHARE, Prediction, check_settings, predict

Array = NDArray[np.float64]

FLOPS_PER_PARAMETER_AND_TOKEN = 6.0


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """Where the least loss for a budget is."""

    flops: float
    params: float
    params_interval: tuple[float, float]
    tokens: float
    tokens_interval: tuple[float, float]
    prediction: Prediction
    notes: tuple[str, ...]

    @property
    def tokens_per_parameter(self) -> float:
        """D* / N*."""
        return self.tokens / self.params


def compute_optimal(fit: Fit, flops: float, *, members: float = 0, every: float = 0) -> Optimum:
    """Return the best N and D for a budget.

    Args:
        fit: Of a law with N, D and two terms that fall with them.
        flops: The budget C, of 6 N D.
        members: M, where the law has it; 0: the largest of the runs.
        every: H, likewise.

    Raises:
        FitError: the law has not both N and D.
        ConfigError: the budget is not a positive number.
    """
    law = fit.law
    if not {"params", "tokens"} <= set(law.variables) or not {"A", "B"} <= set(law.constants):
        raise FitError(
            "the best size for a budget needs a law of params and tokens",
            given=f"{law.title} = {law.equation}",
            expected="runs of at least three sizes and three numbers of tokens, not all at the same"
            " tokens per parameter",
            remedy="add runs (atoll scaling sweep), then fit with --law params,tokens",
        )
    if not (math.isfinite(flops) and flops > 0):
        raise ConfigError("the budget must be a positive number of FLOPs", given=flops)
    arguments = {"members": members, "every": every}
    more = {
        name: float(arguments[name] or fit.ranges[name][1])
        for name in law.variables
        if name in arguments
    }
    check_settings(fit, {"params": 1.0, "tokens": 1.0, **more})
    best = best_split(law, arrays(fit.theta), flops, more)
    spread = best_split(law, arrays(fit.samples), flops, more)
    edges = [(1 - SHARE) / 2, (1 + SHARE) / 2]
    usable = np.isfinite(spread)
    low, high = np.quantile(spread[usable], edges) if usable.any() else (math.nan, math.nan)
    params = float(np.exp(best))
    product = flops / FLOPS_PER_PARAMETER_AND_TOKEN
    if not math.isfinite(params) or not 0 < params < product:
        raise FitError(
            "the law has no best size for this budget",
            given=f"{flops:g} FLOPs, exponents a = {fit.theta['a']:g}, b = {fit.theta['b']:g}",
            remedy="a larger budget, or more runs",
        )
    found = predict(fit, {"params": params, "tokens": product / params, **more})
    return Optimum(
        flops=flops, params=params, params_interval=(_exp(low), _exp(high)),
        tokens=product / params,
        tokens_interval=(_exp(math.log(product) - high), _exp(math.log(product) - low)),
        prediction=found, notes=tuple(_notes(fit, flops, int((~usable).sum()))),
    )  # fmt: skip


def _exp(value: float) -> float:
    """Return e to a power, inf where it overflows: exponents near 0 give no bound."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def best_split(
    law: Law, theta: Mapping[str, Array], flops: float, more: Mapping[str, float]
) -> Array:
    """Return ln N* for one or many values of each constant; NaN where there is no minimum."""
    at = {name: math.log(value) for name, value in more.items()}
    effective = {}
    for term in law.terms:
        powers = [slope for slope in term.slopes if slope.feature in at]
        effective[term.constant] = theta[term.constant] + sum(
            slope.sign * theta[slope.name] * at[slope.feature] for slope in powers
        )
    a, b = theta["a"], theta["b"]
    half = math.log(flops / FLOPS_PER_PARAMETER_AND_TOKEN)
    with np.errstate(all="ignore"):
        log_g = (np.log(a) + effective["A"] - np.log(b) - effective["B"]) / (a + b)
        found: Array = np.asarray(log_g + half * b / (a + b))
    return found


def _notes(fit: Fit, flops: float, without: int) -> list[str]:
    largest = max(point.flops for point in fit.points)
    notes = []
    if flops > FAR * largest:
        notes.append(
            f"the budget is {flops / largest:.3g} x that of the largest run ({largest:.3g} FLOPs)"
        )
    if without:
        notes.append(f"{without} of {len(fit.samples['a'])} resampled laws have no best size")
    return notes
