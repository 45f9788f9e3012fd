"""Fit a law to points: the best of a grid of starts, its intervals, and how well it predicts.

1. Every law of the variables (laws.py) is fitted by L-BFGS from a grid of starts.
2. Each point is left out in turn; the law that predicts the left-out ones best is taken.
3. Intervals: the fit is repeated with errors of left-out points drawn anew and added to the fitted
   losses. (Residuals of the fit itself are too small: a law of five constants meets five of its
   points nearly exactly.)
4. The largest size is left out and predicted from the rest. That error says how far to trust the
   law beyond the largest run, and widens the intervals there (predict.py).

Differs from Hoffmann et al. 2022: errors are resampled, not runs. A sweep is a grid, and a sample
of its runs may lack a whole size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from atoll.errors import AtollError, ConfigError, FitError, RunsContradict, unknown
from atoll.scaling.laws import Law, arrays, check_enough, laws_of, log_terms
from atoll.scaling.minimise import minimise
from atoll.scaling.objective import Bound, Centred
from atoll.scaling.points import (
    VARIABLES,
    Point,
    check_points,
    logarithms,
    tuned,
    values_of,
)

Array = NDArray[np.float64]

RESAMPLES = 200
SEED = 7
SCREENING = 25
"""Steps from each start of the grid, before the best are followed to their ends."""
FOLLOWED = 24
ALTERNATIVES = 3
"""Different minima from which the fits with other data start."""
TOGETHER = 0.999
"""Correlation of ln N and ln D above which they cannot be distinguished."""
NO_FLOOR = 0.01
"""Share of the lowest loss below which E counts as unknown."""


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The runs of the largest size, predicted by a fit without them."""

    variable: str
    value: float
    """The largest N, or D where N is not in the law."""
    ratio: float
    """How many times larger it is than the next one."""
    runs: tuple[dict[str, float | str], ...]
    """Of each: name, predicted, measured, error (a share of the measured loss)."""

    @property
    def mean_error(self) -> float:
        """Mean absolute error, as a share of the measured loss."""
        return math.fsum(abs(float(one["error"])) for one in self.runs) / len(self.runs)

    @property
    def worst_error(self) -> float:
        """Largest absolute error, as a share of the measured loss."""
        return max(abs(float(one["error"])) for one in self.runs)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted law, and the runs and figures that it follows from."""

    law: Law
    theta: dict[str, float]
    """ln of each constant, and each exponent."""
    samples: dict[str, list[float]]
    """The same, from each resampled fit."""
    residuals: list[float]
    """ln measured - ln predicted of each point, by a fit without it."""
    points: tuple[Point, ...]
    score: float
    """Mean absolute error of points that were left out one by one, as a share of the loss."""
    others: tuple[dict[str, object], ...] = ()
    """The laws that were tried: shape, equation and score, or why not."""
    held_out: HeldOut | None = None
    held_out_note: str = ""
    """Why there is no `held_out`."""
    counted: str = ""
    """What `params` counts, in words."""
    notes: tuple[str, ...] = field(default=())

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value of each variable among the runs."""
        found = {name: values_of(self.points, name) for name in VARIABLES}
        return {name: (values[0], values[-1]) for name, values in found.items()}

    def constants(self) -> dict[str, float]:
        """Return the constants as in the equation."""
        return {name: self._shown(name, value) for name, value in self.theta.items()}

    def interval(self, name: str, *, share: float = 0.9) -> tuple[float, float]:
        """Return the interval of a constant over the resampled fits."""
        edges = np.quantile(self.samples[name], [(1 - share) / 2, (1 + share) / 2])
        return self._shown(name, float(edges[0])), self._shown(name, float(edges[1]))

    def _shown(self, name: str, value: float) -> float:
        return math.exp(min(value, 700.0)) if name in self.law.constants else value


def fit(
    points: Sequence[Point],
    *,
    variables: Sequence[str] = (),
    shape: str = "",
    resamples: int = RESAMPLES,
    counted: str = "parameters",
) -> Fit:
    """Return the law that fits some runs best.

    Args:
        points: At least one more than the law has constants. Of runs that differ only in batch and
            learning rates the best count.
        variables: Of `VARIABLES`; empty: all that differ among the runs.
        shape: One of the law's formulas; empty: the one that predicts left-out runs best.
        resamples: Fits for the intervals.
        counted: What `params` counts, in words.

    Raises:
        ConfigError: there is no law of these variables, or no such shape.
        PointNotFinite: a run has no usable loss or size.
        OneValueOnly: the runs do not differ enough in a variable.
        TooFewPoints: there are no more runs than constants.
        RunsContradict: equal runs differ, or the loss does not fall with N or D.
    """
    used = tuple(tuned(check_points(points)))
    named, notes = _variables(used, variables)
    left_out = len(points) - len(used)
    if left_out:
        notes.append(f"{left_out} runs with a worse batch or learning rate are left out")
    tried = [_try(law, used) for law in _wanted(named, shape)]
    usable = [one for one in tried if one.failure is None]
    if not usable:
        raise min(tried, key=lambda one: len(one.law.constants)).failure or FitError("no law")
    best = min(usable, key=lambda one: one.score)
    samples = _resample(best, resamples=resamples)
    held_out, why = _hold_out(best.law, used)
    floor = float(np.exp(np.quantile(samples["E"], 0.05))) if best.law.floor else math.inf
    if floor < NO_FLOOR * min(point.loss for point in used):
        notes.append(
            "E cannot be distinguished from 0: the runs are far above the loss no size goes below"
        )
    return Fit(
        law=best.law,
        theta={name: float(value[0]) for name, value in best.plain.items()},
        samples={name: [float(x) for x in values] for name, values in samples.items()},
        residuals=[float(x) for x in best.residuals],
        points=used,
        score=best.score,
        others=tuple(one.figures() for one in tried),
        held_out=held_out,
        held_out_note=why,
        counted=counted,
        notes=tuple(notes),
    )


def fit_one(law: Law, points: Sequence[Point]) -> dict[str, float]:
    """Return ln of the constants, and the exponents, of one law; no intervals.

    Raises:
        OneValueOnly: the points do not differ enough.
        TooFewPoints: there are no more points than constants.
    """
    check_enough(law, points)
    centred = Centred(law, logarithms(points))
    at = _best(centred, np.ones(len(points)))[:1]
    return {name: float(value[0]) for name, value in centred.plain(at).items()}


def _variables(points: Sequence[Point], wanted: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the variables of the law, and remarks about those that were left out."""
    if wanted:
        laws_of(wanted)  # raises for unknown names
        return tuple(wanted), []
    named = [name for name in VARIABLES if len(values_of(points, name)) > 1]
    notes = []
    if {"params", "tokens"} <= set(named):
        values = logarithms(points)
        if np.corrcoef(values["params"], values["tokens"])[0, 1] > TOGETHER:
            named.remove("tokens")
            notes.append("tokens rise with params in all runs: the law holds along that line only")
    if not {"params", "tokens"} & set(named):
        named.insert(0, "params")  # what is missing is then said by name
    return tuple(named), notes


def _wanted(variables: Sequence[str], shape: str) -> list[Law]:
    laws = laws_of(variables)
    if not shape:
        return laws
    chosen = [law for law in laws if law.shape == shape]
    if not chosen:
        raise unknown(f"shape of {laws[0].title}", shape, [law.shape for law in laws])
    return chosen


@dataclass
class _Tried:
    """A law with its fit, or with why there is none."""

    law: Law
    points: Sequence[Point]
    centred: Centred | None = None
    at: Array = field(default_factory=lambda: np.zeros((0, 0)))
    """The best minima, `(alternatives, parameters)`."""
    residuals: Array = field(default_factory=lambda: np.zeros(0))
    """ln measured - ln predicted of each point, by a fit without it."""
    failure: AtollError | None = None

    @property
    def plain(self) -> dict[str, Array]:
        assert self.centred is not None
        return self.centred.plain(self.at[:1])

    @property
    def score(self) -> float:
        """Mean absolute error of points that were left out."""
        return float(np.abs(self.residuals).mean())

    def figures(self) -> dict[str, object]:
        """Return shape, equation and score for people and programs."""
        figures: dict[str, object] = {"shape": self.law.shape, "equation": self.law.equation}
        return figures | ({"why_not": self.failure.what} if self.failure else {"score": self.score})


def _try(law: Law, points: Sequence[Point]) -> _Tried:
    """Fit one law and find how well it predicts points that are left out."""
    tried = _Tried(law, points)
    try:
        check_enough(law, points)
        tried.centred = Centred(law, logarithms(points))
        tried.at = _best(tried.centred, np.ones(len(points)))
        _check_falls(law, tried.plain, points)
    except FitError as error:
        tried.failure = error
        return tried
    tried.residuals = _left_out(tried)
    return tried


def _best(centred: Centred, weights: Array) -> Array:
    """Return the best minima of a law `(alternatives, parameters)`, best first."""

    def objective(rows: int) -> Bound:
        shape = (rows, len(centred.targets))
        return Bound(
            centred, np.broadcast_to(centred.targets, shape), np.broadcast_to(weights, shape)
        )

    starts = centred.starts()
    at, values = minimise(objective(len(starts)), starts, iterations=SCREENING)
    at = at[np.argsort(values, kind="stable")[:FOLLOWED]]
    at, values = minimise(objective(len(at)), at)
    order = np.argsort(values, kind="stable")
    chosen = [at[order[0]]]
    for row in at[order[1:]]:
        if len(chosen) < ALTERNATIVES and min(np.abs(row - one).max() for one in chosen) > 0.05:
            chosen.append(row)
    return np.array(chosen)


def _again(tried: _Tried, targets: Array, weights: Array) -> Array:
    """Return the parameters of fits to other data, `(fits, parameters)`.

    Args:
        tried: The fit to the data as it is, where these start.
        targets: ln losses `(fits, points)`.
        weights: `(fits, points)`.
    """
    assert tried.centred is not None
    fits, starts = len(targets), tried.at
    many = np.tile(starts, (fits, 1))
    repeated = [np.repeat(data, len(starts), axis=0) for data in (targets, weights)]
    at, values = minimise(Bound(tried.centred, *repeated), many, iterations=200)
    at = at.reshape(fits, len(starts), -1)
    best = values.reshape(fits, len(starts)).argmin(axis=1)
    found: Array = at[np.arange(fits), best]
    return found


def _left_out(tried: _Tried) -> Array:
    """Return ln measured - ln predicted of every point `(points,)`, by a fit without it."""
    assert tried.centred is not None
    targets = tried.centred.targets
    count = len(targets)
    at = _again(tried, np.tile(targets, (count, 1)), 1.0 - np.eye(count))
    found: Array = targets - np.diagonal(tried.centred.predicted(at))
    return found


def _resample(tried: _Tried, *, resamples: int) -> dict[str, Array]:
    """Return the constants of fits to fitted losses with errors drawn anew."""
    assert tried.centred is not None
    if resamples < 1:
        raise ConfigError("there must be at least one resampled fit", given=resamples)
    draw = np.random.default_rng(SEED)
    count = len(tried.residuals)
    picked = tried.residuals[draw.integers(0, count, (resamples, count))]
    targets = tried.centred.predicted(tried.at[:1]) + picked
    return tried.centred.plain(_again(tried, targets, np.ones_like(targets)))


def _check_falls(law: Law, plain: dict[str, Array], points: Sequence[Point]) -> None:
    """Check that the fitted loss falls with N and D.

    Raises:
        RunsContradict: it does not.
    """
    for name, exponent in (("params", "a"), ("tokens", "b")):
        if exponent not in plain or plain[exponent][0] > 0:
            continue
        low, high = (pick(points, key=lambda one: one.value(name)) for pick in (min, max))
        raise RunsContradict(
            f"the loss does not fall with {name} in these runs",
            given=f"{low.loss:.4f} at {low.value(name):g} ({low.name}), "
            f"{high.loss:.4f} at {high.value(name):g} ({high.name})",
            expected=f"a lower loss with more {name}, all else equal",
            remedy="tune the learning rate of each size, train for longer, and leave out runs that "
            "diverged; or fit a law without it: --law NAMES",
        )


def _hold_out(law: Law, points: Sequence[Point]) -> tuple[HeldOut | None, str]:
    """Predict the runs of the largest size from the others; or say why that cannot be done."""
    variable = "params" if "params" in law.variables else "tokens"
    values = values_of(points, variable)
    rest = [point for point in points if point.value(variable) < values[-1]]
    largest = [point for point in points if point.value(variable) == values[-1]]
    try:
        theta = fit_one(law, rest)
    except FitError as error:
        return None, f"{error.what}, without the largest {variable}: {error.expected}"
    runs: list[dict[str, float | str]] = []
    for point, predicted in zip(largest, predicted_losses(law, theta, largest), strict=True):
        loss = float(predicted)
        losses: dict[str, float | str] = {"predicted": loss, "measured": point.loss}
        runs.append({"name": point.name, **losses, "error": loss / point.loss - 1})
    ratio = values[-1] / values[-2]
    return HeldOut(variable=variable, value=values[-1], ratio=ratio, runs=tuple(runs)), ""


def predicted_losses(law: Law, theta: dict[str, float], points: Sequence[Point]) -> Array:
    """Return the losses `(points,)` that a law gives for some settings."""
    settings = [dataclasses.replace(point, loss=1.0) for point in points]
    terms = log_terms(law, arrays(theta), logarithms(settings))
    found: Array = np.exp(terms).sum(axis=0)
    return found
