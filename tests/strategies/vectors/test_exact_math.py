from __future__ import annotations

import torch

from atoll.strategies.vectors.exact_math import orthonormal, outer_sum, tree_sum, uniform


def test_sums_are_those_of_double_precision_for_any_length() -> None:
    for length in (1, 2, 3, 7, 1_000):
        x = uniform(length * 3, seed=length).double().view(length, 3)
        assert (tree_sum(x) - x.sum(0)).abs().max() < 1e-12
    assert torch.equal(tree_sum(torch.zeros(0, 2)), torch.zeros(2))


def test_columns_become_orthonormal_and_keep_their_span() -> None:
    columns = uniform(600, seed=1).view(150, 4)
    basis = orthonormal(columns)
    assert (basis.T @ basis - torch.eye(4, dtype=torch.float64)).abs().max() < 1e-12
    assert (basis @ (basis.T @ columns.double()) - columns.double()).abs().max() < 1e-12


def test_nearly_parallel_columns_are_orthonormal_too() -> None:
    first = uniform(100, seed=2)
    columns = torch.stack([first, first + 1e-4 * uniform(100, seed=3)], dim=1)
    basis = orthonormal(columns)
    assert (basis.T @ basis - torch.eye(2, dtype=torch.float64)).abs().max() < 1e-12


def test_columns_that_depend_on_earlier_ones_become_zero() -> None:
    first = uniform(50, seed=4)
    basis = orthonormal(torch.stack([first, -3 * first, torch.zeros(50)], dim=1))
    assert abs(float(basis[:, 0].norm()) - 1) < 1e-12
    assert not basis[:, 1:].any()


def test_products_of_thin_matrices_are_those_of_matmul() -> None:
    left, right = uniform(60, seed=5).view(20, 3), uniform(45, seed=6).view(15, 3)
    assert (outer_sum(left, right, out=torch.empty(20, 15)) - left @ right.T).abs().max() < 1e-6


def test_numbers_follow_from_the_seed_alone() -> None:
    assert torch.equal(uniform(9, seed=7), uniform(9, seed=7))
    assert uniform(10_000, seed=8).abs().max() <= 1.0
    assert abs(float(uniform(10_000, seed=8).mean())) < 0.03
