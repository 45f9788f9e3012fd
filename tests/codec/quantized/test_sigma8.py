"""The quantiser of standard deviations: means are kept, and the error is the one it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec import make_codec
from atoll.codec.quantized.sigma8 import CHUNK
from tests.tiers import examples


def gaussian(elements: int, *, seed: int = 0) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


def once(x: Tensor, spec: str = "sigma8") -> Tensor:
    codec = make_codec(spec)
    return codec.decode(codec.encode(x))


@pytest.mark.parametrize("spec", ["sigma8:6", "sigma8:12", "sigma8:6:centred"])
@settings(max_examples=examples(40), deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=200),
    shift=st.floats(-10, 10, width=32),
)
def test_mean_of_a_vector_is_kept(spec: str, values: list[float], shift: float) -> None:
    x = torch.tensor(values, dtype=torch.float32) + shift
    difference = abs(float(once(x, spec).double().mean()) - float(x.double().mean()))
    assert difference <= 1e-6 * float(x.double().abs().mean()) + 1e-30


def test_mean_of_every_chunk_is_kept() -> None:
    x = gaussian(3 * CHUNK + 100) + 0.01
    for part, found in zip(torch.split(x, CHUNK), torch.split(once(x), CHUNK), strict=True):
        scale = float(part.double().abs().mean())
        assert abs(float(found.double().mean() - part.double().mean())) < 1e-6 * scale


def test_error_of_a_gaussian_inside_and_over_the_whole_range() -> None:
    x = gaussian(8 * CHUNK)
    lost = (once(x) - x).double()
    inside = x.abs() < 2.9
    assert float(lost[inside].square().mean().sqrt()) == pytest.approx(0.0068, rel=0.05)
    assert float(lost.square().mean().sqrt()) == pytest.approx(0.0159, rel=0.05)


def test_wide_range_has_no_tails_and_coarser_steps() -> None:
    x = gaussian(8 * CHUNK)
    lost = (once(x, "sigma8:12") - x).double()
    assert float(lost.square().mean().sqrt()) == pytest.approx(12 / 256 / 12**0.5, rel=0.05)


def test_range_ends_at_three_standard_deviations() -> None:
    x = gaussian(CHUNK)
    packet = make_codec("sigma8").encode(x)
    codes = np.frombuffer(packet.data, np.uint8, offset=1024)
    deviation = float(x.norm() / (CHUNK - 1) ** 0.5)
    step = 6 * deviation / 256
    assert float(x[torch.from_numpy(codes == 1)].min()) >= -127.51 * step
    assert float(x[torch.from_numpy(codes == 254)].max()) <= 126.51 * step


@pytest.mark.parametrize("value", [0.0, 3.25, -1e-20])
@pytest.mark.parametrize("spec", ["sigma8", "sigma8:6:centred"])
def test_constant_comes_back_exactly_and_again(value: float, spec: str) -> None:
    x = torch.full((1000,), value)
    assert torch.equal(once(x, spec), x)
    assert torch.equal(once(once(x, spec), spec), x)


def test_centring_helps_where_the_mean_is_far_from_zero() -> None:
    x = gaussian(CHUNK) + 20.0
    plain, centred = (float((once(x, spec) - x).norm()) for spec in ("sigma8", "sigma8:6:centred"))
    assert centred < plain / 5


def test_codebooks_lie_first() -> None:
    x = torch.tensor([1.0, 1.0, -1.0, -1.0])
    data = bytes(make_codec("sigma8:12").encode(x).data)
    book, codes = np.frombuffer(data, "<f4", count=256), np.frombuffer(data, np.uint8, offset=1024)
    assert len(data) == 1024 + 4
    assert [float(book[code]) for code in codes] == x.tolist()
    assert np.count_nonzero(book) == 2
