"""Batch sizes and learning rates as powers of N and M, fitted to the best of what was tried.

Charles et al. 2025 (https://arxiv.org/abs/2503.09799): the best batch and inner learning rate are
fitted as A N^a M^m; the best outer learning rate hardly depends on N, which the fit then shows as
an exponent a near 0.

For each N and M the best value is the vertex of a parabola in ln(value) through the lowest loss and
its two neighbours. Where the lowest loss is at the edge of what was tried there is no vertex: the
group is left out, and a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import TooFewPoints
from atoll.scaling.laws import Law, Slope, Term
from atoll.scaling.minimise import minimise
from atoll.scaling.objective import Bound, Centred
from atoll.scaling.points import Point, check_points, values_of

Array = NDArray[np.float64]

HYPERPARAMETERS = ("batch", "lr", "outer_lr")


@dataclass(frozen=True, kw_only=True)
class Best:
    """The best value for one size and number of members."""

    params: float
    members: float
    value: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class RateLaw:
    """A hyper-parameter as a power of N and M: `factor N^a M^m`."""

    name: str
    factor: float
    a: float
    """Exponent of N; 0 where all runs have one size."""
    m: float
    """Exponent of M; 0 where all runs have one number of members."""
    best: tuple[Best, ...]
    """What it was fitted to."""
    error: float
    """Mean absolute deviation of these from the law, as a share."""
    notes: tuple[str, ...]

    def at(self, *, params: float, members: float = 1.0) -> float:
        """Return the value for a size and a number of members."""
        return float(self.factor * params**self.a * members**self.m)


def fit_rate(points: Sequence[Point], name: str) -> RateLaw:
    """Return how the best value of one of `HYPERPARAMETERS` depends on N and M.

    Raises:
        TooFewPoints: fewer than two sizes and numbers of members have a best value between others.
        PointNotFinite: a run has no usable loss or size.
        RunsContradict: two equal runs differ.
    """
    best, notes = best_values(points, name)
    size = Slope("a", 1.0, "params")
    members = Slope("m", 1.0, "members")
    found = [Point(params=b.params, tokens=1.0, members=b.members, loss=b.value) for b in best]
    slopes = [
        slope for slope in (size, members) if found and len(values_of(found, slope.feature)) > 1
    ]
    if not slopes or len(found) < len(slopes) + 1:
        raise TooFewPoints(
            f"there are too few best values of {name} for a law",
            given=f"{len(found)} sizes and numbers of members with one"
            + "".join(f"; {n}" for n in notes[:2]),
            expected=f"at least two, each between smaller and larger {name} that are worse",
            remedy=f"in a sweep: {name} = [three values or more], at two sizes or more",
        )
    law = Law(("params", "members"), "power", "", (Term("A", tuple(slopes)),))
    values = {
        "params": np.log([p.params for p in found]),
        "members": np.log([p.members for p in found]),
        "loss": np.log([p.loss for p in found]),
    }
    centred = Centred(law, values)
    targets, weights = values["loss"][None], np.ones((1, len(found)))
    starts = np.zeros((1, len(centred.columns)))
    starts[0, 0] = float(np.median(targets))
    at, _ = minimise(Bound(centred, targets, weights), starts)
    plain = {key: float(value[0]) for key, value in centred.plain(at).items()}
    wrong = centred.predicted(at)[0] - values["loss"]
    return RateLaw(
        name=name, factor=math.exp(plain["A"]), a=plain.get("a", 0.0), m=plain.get("m", 0.0),
        best=tuple(best), error=float(np.expm1(np.abs(wrong)).mean()), notes=tuple(notes),
    )  # fmt: skip


def best_values(points: Sequence[Point], name: str) -> tuple[list[Best], list[str]]:
    """Return the best value of a hyper-parameter for each N and M, and what was left out.

    Of each value the lowest loss over the other settings counts, at the largest D of that N and M.
    """
    groups: dict[tuple[float, float], list[Point]] = {}
    for point in check_points(points):
        if point.value(name) > 0:
            groups.setdefault((point.params, point.members), []).append(point)
    found, notes = [], []
    for (params, members), all_of in groups.items():
        longest = max(point.tokens for point in all_of)
        lowest: dict[float, float] = {}
        for point in all_of:
            if point.tokens == longest:
                value = point.value(name)
                lowest[value] = min(point.loss, lowest.get(value, math.inf))
        where = f"N = {params:g}, M = {members:g}"
        vertex = _vertex(lowest)
        if vertex is None:
            tried = ", ".join(f"{value:g}" for value in sorted(lowest))
            notes.append(f"{where}: no best {name} between others ({tried} tried)")
        else:
            found.append(Best(params=params, members=members, value=vertex[0], loss=vertex[1]))
    return found, notes


def _vertex(lowest: dict[float, float]) -> tuple[float, float] | None:
    """Return value and loss at the vertex of the parabola around the lowest loss."""
    values = sorted(lowest)
    least = min(values, key=lowest.__getitem__)
    place = values.index(least)
    if place in (0, len(values) - 1):
        return None
    three = values[place - 1 : place + 2]
    curve = np.polyfit(np.log(three) - math.log(least), [lowest[value] for value in three], 2)
    step = -curve[1] / (2 * curve[0])
    return float(least * np.exp(step)), float(np.polyval(curve, step))
