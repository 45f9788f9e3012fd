from __future__ import annotations

import pytest
import torch

from atoll.codec.sparse.cosine import Pieces, cosines, divided


@pytest.mark.parametrize("side", [1, 2, 3, 17, 64, 256])
def test_cosines_are_orthonormal(side: int) -> None:
    waves = cosines(side)
    assert (waves @ waves.T - torch.eye(side, dtype=torch.float64)).abs().max() < 1e-10
    assert waves[0].std(unbiased=False) < 1e-12, "the first is the mean"


@pytest.mark.parametrize(
    ("length", "side", "count"), [(128, 64, 2), (96, 48, 2), (26, 26, 1), (257, 64, 5), (1, 1, 1)]
)
def test_sides_are_the_largest_divisor_where_that_is_useful(
    length: int, side: int, count: int
) -> None:
    assert divided(length, 64) == (side, count)


@pytest.mark.parametrize("shape", [(5,), (128, 96), (257, 70), (4, 3, 3, 3), (), (1, 130)])
def test_tensors_survive_the_transform_and_keep_their_energy(shape: tuple[int, ...]) -> None:
    pieces = Pieces.of(shape)
    left, right = cosines(pieces.height).float(), cosines(pieces.width).float()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).flatten()
    found = pieces.coefficients(x, left, right)
    assert found.shape == (pieces.count, pieces.size)
    assert (pieces.values(found, left, right) - x).abs().max() < 1e-5
    assert float(found.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-5)


def test_a_smooth_matrix_has_few_large_coefficients() -> None:
    rows, columns = torch.meshgrid(torch.arange(64.0), torch.arange(64.0), indexing="ij")
    x = (0.3 + 0.02 * rows - 0.01 * columns).flatten()
    found = Pieces.of((64, 64)).coefficients(x, cosines(64).float(), cosines(64).float())
    kept = found.abs().topk(32).values.square().sum()
    assert float(kept / x.square().sum()) > 0.999
