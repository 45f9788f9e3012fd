"""L-BFGS from many starts at once: every start is a row, and all rows take their steps together.

Nocedal and Wright, "Numerical Optimization" (2nd ed.), Algorithm 7.4, with the line search for weak
Wolfe conditions of Lewis and Overton, "Nonsmooth optimization via quasi-Newton methods" (2013),
because the Huber loss is nearly an absolute value where it matters.

A grid of thousands of starts, and the fits of hundreds of resampled data sets, take a few seconds
this way, and minutes one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
Objective = Callable[[Array, Rows], tuple[Array, Array]]
"""Of points `(rows, variables)` and the numbers of their rows: values `(rows,)` and gradients."""

MEMORY = 12
SUFFICIENT_DECREASE = 1e-4
CURVATURE = 0.9
SEARCHES = 40
"""Evaluations of one line search; then the row has converged as far as rounding lets it."""
FLAT = 1e-14
"""Relative decrease below which a step counts as none."""


def minimise(
    objective: Objective, starts: Array, *, iterations: int = 500, tolerance: float = 1e-9
) -> tuple[Array, Array]:
    """Return the minima `(rows, variables)` found from each start, and their values `(rows,)`.

    Args:
        objective: Its values and gradients; a value that is not finite is a step too far.
        starts: Points `(rows, variables)`.
        iterations: Most steps of a row.
        tolerance: Largest component of the gradient at which a row has arrived.
    """
    at = np.array(starts, dtype=np.float64)
    values, gradients = objective(at, np.arange(len(at)))
    history = _History(at.shape)
    still = np.isfinite(values)
    idle = np.zeros(len(at), dtype=int)
    for _ in range(iterations):
        rows = np.flatnonzero(still & (np.abs(gradients).max(axis=1) > tolerance))
        if not rows.size:
            break
        direction = history.direction(gradients[rows], rows)
        moved, new_values, new_gradients, found = _search(
            objective, at[rows], values[rows], gradients[rows], direction, rows
        )
        history.add(rows, moved - at[rows], new_gradients - gradients[rows])
        gained = values[rows] - new_values
        idle[rows] = np.where(
            gained > FLAT * np.maximum(1.0, np.abs(new_values)), 0, idle[rows] + 1
        )
        at[rows], values[rows], gradients[rows] = moved, new_values, new_gradients
        history.forget(rows[~found])
        still[rows] = idle[rows] < 3
    return at, values


class _History:
    """The last steps of each row and how its gradient changed in them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        rows, variables = shape
        self._steps = np.zeros((MEMORY, rows, variables))
        self._changes = np.zeros((MEMORY, rows, variables))
        self._weights = np.zeros((MEMORY, rows))
        """1 / (step . change); 0: this place is empty."""

    def add(self, rows: Rows, steps: Array, changes: Array) -> None:
        """Keep the newest steps of some rows; those without positive curvature are left out."""
        product = (steps * changes).sum(axis=1)
        good = product > 1e-12 * np.sqrt((steps**2).sum(axis=1) * (changes**2).sum(axis=1))
        rows, steps, changes, product = rows[good], steps[good], changes[good], product[good]
        for kept, new in (
            (self._steps, steps),
            (self._changes, changes),
            (self._weights, 1.0 / product),
        ):
            newer: Any = kept[:, rows]
            newer[:-1] = newer[1:]
            newer[-1] = new
            kept[:, rows] = newer

    def forget(self, rows: Rows) -> None:
        """Start some rows anew, with steepest descent."""
        self._weights[:, rows] = 0.0

    def direction(self, gradients: Array, rows: Rows) -> Array:
        """Return the descent directions `(rows, variables)`, by the two-loop recursion."""
        steps, changes = self._steps[:, rows], self._changes[:, rows]
        weights = self._weights[:, rows]
        found = gradients.copy()
        shares = np.zeros_like(weights)
        for i in range(MEMORY - 1, -1, -1):
            shares[i] = weights[i] * (steps[i] * found).sum(axis=1)
            found -= shares[i][:, None] * changes[i]
        newest = weights[-1] > 0
        size = np.where(newest, weights[-1] * (changes[-1] ** 2).sum(axis=1), 1.0)
        steepest = 1.0 / np.maximum(1e-300, np.sqrt((gradients**2).sum(axis=1)))
        found *= np.where(newest, 1.0 / np.maximum(size, 1e-300), 0.1 * steepest)[:, None]
        for i in range(MEMORY):
            again = weights[i] * (changes[i] * found).sum(axis=1)
            found += (shares[i] - again)[:, None] * steps[i]
        slope = (found * gradients).sum(axis=1)
        lost = ~(slope > 0)  # also NaN
        self.forget(rows[lost])
        found[lost] = 0.1 * (gradients * steepest[:, None])[lost]
        return -found


def _search(
    objective: Objective,
    at: Array,
    values: Array,
    gradients: Array,
    direction: Array,
    rows: Rows,
) -> tuple[Array, Array, Array, NDArray[np.bool_]]:
    """Return points, values and gradients after a step along each direction, and which were found.

    A row whose search ends without both conditions takes the best point that it has seen.
    """
    slope = (gradients * direction).sum(axis=1)
    length, shortest = np.ones(len(at)), np.zeros(len(at))
    longest = np.full(len(at), np.inf)
    best, best_values, best_gradients = at.copy(), values.copy(), gradients.copy()
    found = np.zeros(len(at), dtype=bool)
    for _ in range(SEARCHES):
        todo = np.flatnonzero(~found)
        if not todo.size:
            break
        trial = at[todo] + length[todo, None] * direction[todo]
        with np.errstate(all="ignore"):
            new_values, new_gradients = objective(trial, rows[todo])
        enough = values[todo] + SUFFICIENT_DECREASE * length[todo] * slope[todo]
        low = np.isfinite(new_values) & (new_values <= enough)
        flat = low & ((new_gradients * direction[todo]).sum(axis=1) >= CURVATURE * slope[todo])
        better = low & (new_values <= best_values[todo])
        keep = todo[better]
        best[keep], best_values[keep] = trial[better], new_values[better]
        best_gradients[keep] = new_gradients[better]
        found[todo[flat]] = True
        longest[todo[~low]] = length[todo[~low]]
        shortest[todo[low & ~flat]] = length[todo[low & ~flat]]
        open_end = np.isinf(longest[todo])
        between = (shortest[todo] + np.where(open_end, 0.0, longest[todo])) / 2
        length[todo] = np.where(open_end, 2 * length[todo], between)
    return best, best_values, best_gradients, found
