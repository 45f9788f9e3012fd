from __future__ import annotations

import pytest
import torch

from atoll.errors import ConfigError
from atoll.strategies.delta import Flat, digest, is_finite, pseudo_gradient


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


def test_reading_into_a_buffer_makes_no_new_one() -> None:
    flat = Flat([torch.ones(3)])
    out = flat.new()
    assert flat.read(out) is out


def test_a_vector_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 elements"):
        Flat([torch.ones(3)]).write(torch.zeros(4))


def test_subtracting_the_pseudo_gradient_leads_to_where_the_member_went() -> None:
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
        ([1.0, 2.0], True),
        ([1.0, float("nan")], False),
        ([float("inf"), float("-inf")], False),
        ([3e38, 3e38], True),
        ([], True),
    ],
)
def test_finite_vectors_are_told_from_others(values: list[float], expected: bool) -> None:
    assert is_finite(torch.tensor(values)) is expected
