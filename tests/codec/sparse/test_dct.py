"""The cosine transform as a codec: orthonormal, the largest coefficients, exact arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.codec import make_codec
from atoll.codec.sparse.cosine import cosines
from atoll.codec.sparse.dct import CHUNK, SIDE, Dct


def gaussian(elements: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def codec(kept: int) -> Dct:
    found = make_codec(f"dct:{kept}")
    assert isinstance(found, Dct)
    return found


@pytest.mark.parametrize("elements", [1, CHUNK, 3 * CHUNK + 5])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_round_trip_of_all_coefficients(elements: int, scale: float) -> None:
    x = gaussian(elements) * scale
    found = codec(CHUNK).decode(codec(CHUNK).encode(x))
    assert float((found - x).abs().max()) < 1e-5 * float(x.abs().max())


def test_kept_coefficients_have_more_energy_than_any_others() -> None:
    x = gaussian(CHUNK)
    matrix = cosines(SIDE)
    z = (matrix @ x.double().view(SIDE, SIDE) @ matrix.T).view(-1)
    kept = float(codec(64).decode(codec(64).encode(x)).norm())
    assert kept == pytest.approx(float(z.abs().topk(64).values.norm()), rel=1e-4)
    for seed in range(5):
        other = torch.from_numpy(np.random.default_rng(seed).permutation(CHUNK)[:64])
        assert kept > float(z[other].norm())


def test_smooth_vector_needs_few_coefficients() -> None:
    x = torch.sin(torch.arange(2 * CHUNK) / 300.0)
    found = codec(32).decode(codec(32).encode(x))
    assert float((found - x).norm() / x.norm()) < 0.05
    sparse = make_codec("topk:0.0078125")
    assert float((sparse.decode(sparse.encode(x)) - x).norm() / x.norm()) > 0.9


def test_inverse_sums_whole_numbers_that_float64_holds_exactly() -> None:
    transform = codec(1)
    largest = float(transform._whole.abs().sum(0).max()) * 2**22
    assert largest < 2**53
    # Rounded intermediate values are up to sqrt(64) times as large as coefficients.
    assert float(transform._whole.abs().sum(1).max()) * 2 ** (22 + 3 + 3) < 2**53
    # No entry lies so close to a half that another library's cosine could round it differently.
    exact = cosines(SIDE).numpy() * 2**20
    assert float(np.abs(np.abs(exact - np.floor(exact)) - 0.5).min()) > 1e-6


def test_inverse_is_the_same_bits_in_another_order_of_additions() -> None:
    transform, z = codec(1), gaussian(4 * CHUNK).view(4, CHUNK)
    found = transform.inverse(z)
    order = torch.randperm(SIDE, generator=torch.Generator().manual_seed(1))
    shuffled = codec(1)
    shuffled._whole = transform._whole[order]
    moved = z.view(4, SIDE, SIDE)[:, order][:, :, order].reshape(4, CHUNK)
    assert torch.equal(shuffled.inverse(moved), found)


def test_broken_chunk_is_broken_as_a_whole_and_no_other() -> None:
    x = gaussian(3 * CHUNK)
    x[CHUNK + 5] = torch.inf
    found = codec(32).decode(codec(32).encode(x))
    assert not torch.isfinite(found[CHUNK : 2 * CHUNK]).any()
    assert torch.isfinite(found[:CHUNK]).all()
    assert torch.isfinite(found[2 * CHUNK :]).all()


@pytest.mark.parametrize(("kept", "nbytes"), [(32, 2 * 32 + 4 * 32), (300, 512 + 4 * 300)])
def test_packet_weighs_what_it_says(kept: int, nbytes: int) -> None:
    assert codec(kept).nbytes(CHUNK) == nbytes
    assert codec(kept).nbytes(CHUNK + 1) == 2 * nbytes
