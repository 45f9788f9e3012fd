"""What a law is fitted to: one point per finished run, and the checks that it may be used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.errors import PointNotFinite, RunsContradict

VARIABLES = ("params", "tokens", "members", "every")
"""N, D, M and H, in the order in which they are written."""

LETTERS = dict(zip(VARIABLES, "NDMH", strict=True))

TOLERATED = 0.10
"""Largest difference of two runs with the same settings, as a share of the loss. Seeds of small
models differ by one or two hundredths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One finished run."""

    params: float
    """N: parameters, counted the same way in all runs."""
    tokens: float
    """D: tokens (or images) that all members together were trained on."""
    members: float = 1.0
    """M: members at the start."""
    every: float = 1.0
    """H: optimizer steps between two rounds."""
    loss: float
    """Final held-out loss, nats per token or image."""
    batch: float = 0.0
    """Sequences of one step of all members together; 0: unknown."""
    lr: float = 0.0
    """Peak learning rate of the inner optimizer; 0: unknown."""
    outer_lr: float = 0.0
    """Learning rate of the outer optimizer; 0: unknown, or none."""
    name: str = ""
    """The run's folder, or the line of a table: where the figures come from."""

    def value(self, variable: str) -> float:
        """Return one of `VARIABLES`."""
        return float(getattr(self, variable))

    @property
    def flops(self) -> float:
        """Training compute by the rule C = 6 N D."""
        return 6.0 * self.params * self.tokens


def check_points(points: Sequence[Point]) -> tuple[Point, ...]:
    """Return points in an order of their own, whatever the order in which they came.

    Raises:
        PointNotFinite: a loss, size or count is not a positive number.
        RunsContradict: two runs with the same settings ended with very different losses.
    """
    for point in points:
        for field in ("loss", *VARIABLES):
            value = point.value(field)
            if not (math.isfinite(value) and value > 0):
                raise PointNotFinite(
                    f"a run cannot be used: its {field} is not a positive number",
                    given=f"{field} = {value:g} in {point.name or 'a run'}",
                    expected="a finite number above 0",
                    remedy="leave this run out, or train it again with a lower learning rate",
                )
    ordered = sorted(points, key=dataclasses.astuple)
    _check_repeats(ordered)
    return tuple(ordered)


def _check_repeats(ordered: Sequence[Point]) -> None:
    groups: dict[tuple[float, ...], list[Point]] = {}
    for point in ordered:
        groups.setdefault((*_place(point), *_tuning(point)), []).append(point)
    for same in groups.values():
        low, high = min(same, key=_loss), max(same, key=_loss)
        if high.loss > low.loss * (1 + TOLERATED):
            raise RunsContradict(
                "two runs with the same settings ended with very different losses",
                given=f"{low.loss:.4f} in {low.name or 'one'}, "
                f"{high.loss:.4f} in {high.name or 'the other'}",
                expected=f"at most {TOLERATED:.0%} between them",
                remedy="compare their job.toml, leave out the one that went wrong, or add seeds",
            )


def tuned(points: Sequence[Point]) -> list[Point]:
    """Return, of runs that differ only in batch and learning rates, those with the lowest loss.

    Repeats with other seeds are all kept.
    """
    groups: dict[tuple[float, ...], dict[tuple[float, ...], list[Point]]] = {}
    for point in points:
        groups.setdefault(_place(point), {}).setdefault(_tuning(point), []).append(point)
    best = [min(found.values(), key=_mean_loss) for found in groups.values()]
    return sorted((one for same in best for one in same), key=dataclasses.astuple)


def _place(point: Point) -> tuple[float, ...]:
    return tuple(point.value(name) for name in VARIABLES)


def _tuning(point: Point) -> tuple[float, ...]:
    return point.batch, point.lr, point.outer_lr


def _mean_loss(points: Sequence[Point]) -> float:
    return math.fsum(point.loss for point in points) / len(points)


def _loss(point: Point) -> float:
    return point.loss


def values_of(points: Sequence[Point], variable: str) -> list[float]:
    """Return the different values of a variable, ascending."""
    return sorted({point.value(variable) for point in points})


def logarithms(points: Sequence[Point]) -> dict[str, NDArray[np.float64]]:
    """Return the natural logarithms `(points,)` of the four variables and of the loss."""
    names = (*VARIABLES, "loss")
    return {name: np.log([point.value(name) for point in points]) for name in names}
