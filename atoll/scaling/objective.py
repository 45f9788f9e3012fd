"""The Huber loss of a law in log space, with its gradient, for many fits at once.

Hoffmann et al. 2022, equation 3: the sum over runs of Huber(log L_predicted - log L), delta 1e-3.

Differs from the paper:
  * variables are centred and scaled before the fit, and starts are set around the middle of the
    data instead of by fixed numbers; the minimum is the same, but a change of units or of the
    unit of loss changes nothing, and no size of model falls outside of the grid;
  * the sum is divided by delta, which only sets the unit of the gradient. It is a sum, not a mean:
    with a mean, stopping rules end the search too early.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from atoll.scaling.laws import Law, Slope, features
from atoll.scaling.minimise import Rows

Array = NDArray[np.float64]

DELTA = 1e-3

SHARES = (0.03, 0.2, 0.7)
"""Of the mean loss, where the terms of a law start in the middle of the data."""

SIZE_EXPONENTS = (0.05, 0.2, 0.5, 1.0)
"""Starts of the exponents of N and D."""

OTHER_EXPONENTS = (0.0, 0.05)
"""Starts of the exponents of M and H."""


class Centred:
    """A law over some points, in variables of mean 0 and deviation 1.

    Columns of its parameters: ln of each constant in the middle of the data, then each exponent
    times the deviation of its variable.
    """

    def __init__(self, law: Law, values: Mapping[str, Array]) -> None:
        """Centre the features of the points.

        Args:
            law: The law.
            values: ln of the variables and, as `loss`, of the loss; each `(points,)`.
        """
        self.law, self.targets = law, values["loss"]
        self.columns = (*law.constants, *law.exponents)
        found = features(values)
        slopes = [*(s for term in law.terms for s in term.slopes), *law.shared]
        self._middle = {s.feature: float(found[s.feature].mean()) for s in slopes}
        self._spread = {s.name: float(found[s.feature].std()) or 1.0 for s in slopes}
        points = len(self.targets)
        self._linear = np.zeros((len(law.terms), len(self.columns), points))
        """d ln(term) / d parameter."""
        for i, term in enumerate(law.terms):
            self._linear[i, self.columns.index(term.constant)] = 1.0
            for slope in (*term.slopes, *law.shared):
                centred = found[slope.feature] - self._middle[slope.feature]
                row = self._linear[i, self.columns.index(slope.name)]
                row += slope.sign * centred / self._spread[slope.name]

    def __call__(self, at: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
        """Return values `(rows,)` and gradients `(rows, parameters)`.

        Args:
            at: Parameters `(rows, parameters)`.
            targets: ln of the losses that each row is fitted to, `(rows, points)`.
            weights: How often each point counts, `(rows, points)`.
        """
        terms = np.einsum("rk,tkp->rtp", at, self._linear, optimize=True)
        top = terms.max(axis=1, keepdims=True)
        powers = np.exp(terms - top)
        total = powers.sum(axis=1)
        wrong = top[:, 0] + np.log(total) - targets
        near = np.abs(wrong) <= DELTA
        each = np.where(near, wrong**2 / (2 * DELTA), np.abs(wrong) - DELTA / 2)
        pull = weights * np.clip(wrong / DELTA, -1.0, 1.0)
        shares = powers / total[:, None]
        gradients = np.einsum("rtp,tkp->rk", shares * pull[:, None], self._linear, optimize=True)
        return (weights * each).sum(axis=1), gradients

    def predicted(self, at: Array) -> Array:
        """Return ln of the predicted losses `(rows, points)`."""
        terms = np.einsum("rk,tkp->rtp", at, self._linear, optimize=True)
        top = terms.max(axis=1, keepdims=True)
        found: Array = top[:, 0] + np.log(np.exp(terms - top).sum(axis=1))
        return found

    def starts(self) -> Array:
        """Return the grid of starts, `(rows, parameters)`."""
        level = float(np.median(self.targets))
        axes: list[Sequence[float]] = [
            [level + float(np.log(share)) for share in SHARES] for _ in self.law.constants
        ]
        if len(self.law.constants) == 1:
            axes = [[level]]
        for name in self.law.exponents:
            grid = SIZE_EXPONENTS if name in ("a", "b") else OTHER_EXPONENTS
            axes.append([value * self._spread[name] for value in grid])
        return np.array(list(itertools.product(*axes)), dtype=np.float64)

    def plain(self, at: Array) -> dict[str, Array]:
        """Return ln of each constant and each exponent of the equation, each `(rows,)`."""
        column = dict(zip(self.columns, at.T, strict=True))
        exponents = {name: column[name] / self._spread[name] for name in self.law.exponents}

        def moved(slopes: Sequence[Slope]) -> Array:
            parts = (s.sign * exponents[s.name] * self._middle[s.feature] for s in slopes)
            return np.asarray(sum(parts, np.float64(0.0)))

        constants = {
            term.constant: column[term.constant] - moved((*term.slopes, *self.law.shared))
            for term in self.law.terms
        }
        return {**constants, **exponents}


class Bound:
    """An objective for `minimise`: row i is fitted to `targets[i]` with `weights[i]`."""

    def __init__(self, centred: Centred, targets: Array, weights: Array) -> None:
        self._centred, self._targets, self._weights = centred, targets, weights

    def __call__(self, at: Array, rows: Rows) -> tuple[Array, Array]:
        """Return values and gradients of some rows."""
        return self._centred(at, self._targets[rows], self._weights[rows])
