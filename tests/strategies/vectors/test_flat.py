from __future__ import annotations

import math

import pytest
import torch

from atoll.errors import ConfigError
from atoll.strategies.vectors.flat import Flat, digest, length, pseudo_gradient


def test_reading_and_writing_a_model_is_exact() -> None:
    tensors = [torch.randn(3, 4), torch.randn(()), torch.randn(0), torch.randn(7)]
    copies = [torch.zeros_like(t) for t in tensors]
    flat = Flat(tensors)
    vector = flat.read()
    assert vector.shape == (20,)
    Flat(copies).write(vector)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_bfloat16_parameters_are_read_as_float32() -> None:
    tensor = torch.randn(9).bfloat16()
    vector = Flat([tensor]).read()
    assert vector.dtype == torch.float32
    assert torch.equal(vector, tensor.float())


def test_float64_and_complex_tensors_are_carried_exactly() -> None:
    """Row by row: also one whose memory is not contiguous, and one at an odd place."""
    tensors = [
        torch.randn(3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(4, 5).t(), torch.tensor(1 + 1e-15, dtype=torch.float64),
    ]  # fmt: skip
    flat, copies = Flat(tensors), [torch.zeros_like(t) for t in tensors]
    vector = flat.read()
    assert vector.dtype == torch.float64
    assert vector.shape == (3 + 12 + 20 + 1,)
    Flat(copies).write(vector)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(tensors, flat.values(vector), strict=True))
    assert Flat(tensors, rounded=True).read().dtype == torch.float32


def test_tensors_that_move_to_other_memory_are_followed() -> None:
    """Views are kept from read to read; `module.to(...)` puts the values elsewhere."""
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    flat = Flat([parameter])
    assert torch.equal(flat.read(), torch.ones(6))
    parameter.data = torch.full((2, 3), 2.0)
    assert torch.equal(flat.read(), torch.full((6,), 2.0))
    flat.write(torch.zeros(6))
    assert torch.equal(parameter.detach(), torch.zeros(2, 3))


def test_reading_into_a_buffer_makes_no_new_one() -> None:
    flat = Flat([torch.ones(3)])
    out = flat.new()
    assert flat.read(out) is out


def test_a_vector_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 elements"):
        Flat([torch.ones(3)]).write(torch.zeros(4))


def test_start_minus_pseudo_gradient_is_the_end() -> None:
    start, now = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    assert torch.equal(start - pseudo_gradient(start, now), now)


def test_digests_differ_when_one_bit_does() -> None:
    a = torch.zeros(100)
    b = a.clone()
    b[50] = -0.0
    assert digest(a) == digest(a.clone())
    assert digest(a) != digest(b)
    assert len(digest(torch.zeros(0))) == 32


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, 4.0], 5.0),
        ([3e38, 4e38 / 2], 3.6056e38),
        ([3e-30, 4e-30], 5e-30),
        ([0.0, 0.0], 0.0),
        ([], 0.0),
    ],
)
def test_length_is_the_norm_also_where_squares_overflow(
    values: list[float], expected: float
) -> None:
    assert length(torch.tensor(values)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "values", [[1.0, math.nan], [math.inf, -math.inf], [0.0, math.inf], [3e38, math.nan, 3e38]]
)
def test_length_of_what_is_not_finite_is_not_finite(values: list[float]) -> None:
    assert not math.isfinite(length(torch.tensor(values)))


def test_length_of_many_large_values_is_finite() -> None:
    assert math.isfinite(length(torch.full((4,), 1e38)))


def test_a_snapshot_is_of_its_moment_and_a_mixture_is_exact() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.ones(2)]
    flat = Flat(tensors)
    later = flat.snapshot()
    flat.mix(torch.full((8,), 4.0), keep=0.25)
    assert later().tolist() == [0, 1, 2, 3, 4, 5, 1, 1]
    assert flat.read().tolist() == [3, 3.25, 3.5, 3.75, 4, 4.25, 3.25, 3.25]
