"""L-BFGS over many rows."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.scaling.minimise import Array, Rows, minimise


def test_every_row_finds_the_minimum_of_its_own_problem() -> None:
    centres = np.array([[1.0, -2.0], [30.0, 4.0], [0.0, 0.0]])

    def bowls(at: Array, rows: Rows) -> tuple[Array, Array]:
        away = at - centres[rows]
        scale = np.array([1.0, 100.0])
        return (scale * away**2).sum(axis=1), 2 * scale * away

    at, values = minimise(bowls, np.zeros((3, 2)))
    assert at == pytest.approx(centres, abs=1e-6)
    assert values == pytest.approx(np.zeros(3), abs=1e-12)


def test_a_curved_valley_is_followed_to_its_end() -> None:
    def rosenbrock(at: Array, _: Rows) -> tuple[Array, Array]:
        x, y = at.T
        value = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        slope = np.stack([-2 * (1 - x) - 400 * x * (y - x**2), 200 * (y - x**2)], axis=1)
        return value, slope

    starts = np.array([[-1.2, 1.0], [3.0, -3.0], [0.0, 0.0]])
    at, _ = minimise(rosenbrock, starts)
    assert at == pytest.approx(np.ones((3, 2)), abs=1e-5)


def test_a_row_without_a_finite_value_stays_where_it_is() -> None:
    def logarithm(at: Array, _: Rows) -> tuple[Array, Array]:
        with np.errstate(invalid="ignore"):
            value = at[:, 0] - np.log(at[:, 0])
        return value, 1 - 1 / at

    at, values = minimise(logarithm, np.array([[-5.0], [0.01], [7.0]]))
    assert at[0, 0] == -5.0
    assert np.isnan(values[0])
    assert at[1:, 0] == pytest.approx(np.ones(2), abs=1e-6)


def test_other_rows_change_nothing_in_a_rows_answer() -> None:
    def absolute(at: Array, _: Rows) -> tuple[Array, Array]:
        return np.hypot(at, 1e-3).sum(axis=1), at / np.hypot(at, 1e-3)

    starts = np.linspace(-3, 5, 12).reshape(6, 2)
    together, _ = minimise(absolute, starts)
    alone = [minimise(absolute, row[None])[0][0] for row in starts]
    assert np.array_equal(together, np.array(alone))
