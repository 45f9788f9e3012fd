from __future__ import annotations

import pytest
import torch

from atoll.rl.nets.policy import CLIP, RunningNorm, normalised


def numbers(count: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([1.0, 100.0, 1e-3]), torch.tensor([0.0, -50.0, 5.0])
    return torch.randn(count, 3, generator=generator) * scale + shift


@pytest.mark.parametrize("cuts", [(1000,), (1, 999), (500, 500), (7, 3, 1, 489, 500)])
def test_statistics_do_not_depend_on_batching(cuts: tuple[int, ...]) -> None:
    everything, norm = numbers(1000), RunningNorm((3,))
    for part in torch.split(everything, list(cuts)):
        norm.update(part)
    right = everything.double()
    assert norm.count == 1000
    assert torch.allclose(norm.mean, right.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.allclose(norm.variance, right.var(0, unbiased=False), rtol=1e-9)


def test_leading_dimensions_are_all_observations() -> None:
    flat, shaped = RunningNorm((3,)), RunningNorm((3,))
    flat.update(numbers(24))
    shaped.update(numbers(24).reshape(4, 6, 3))
    assert torch.equal(flat.mean, shaped.mean)
    picture = RunningNorm((2, 3))
    picture.update(torch.ones(5, 2, 3))
    assert picture.count == 5
    assert picture(torch.ones(7, 2, 3)).shape == (7, 2, 3)


def test_observations_are_only_clipped_before_anything_was_seen() -> None:
    norm = RunningNorm((3,))
    norm.update(torch.empty(0, 3))
    assert norm(torch.tensor([[1.0, -2.0, 300.0]])).tolist() == [[1.0, -2.0, CLIP]]


def test_what_was_seen_comes_out_with_mean_0_and_deviation_1() -> None:
    everything, norm = numbers(10_000), RunningNorm((3,))
    norm.update(everything)
    out = norm(everything)
    assert out.dtype == torch.float32
    assert torch.allclose(out.mean(0), torch.zeros(3), atol=1e-2)
    assert torch.allclose(out.std(0), torch.ones(3), atol=1e-2)


def test_constant_stays_finite_and_outliers_are_clipped() -> None:
    norm = RunningNorm((1,))
    norm.update(torch.full((10, 1), 3.0))
    assert norm(torch.tensor([[3.0], [9.0], [-9.0]])).flatten().tolist() == [0.0, CLIP, -CLIP]


def test_a_scale_keeps_what_was_true_when_it_was_taken() -> None:
    norm, seen = RunningNorm((3,)), numbers(50, seed=3)
    norm.update(numbers(100))
    before, scale = norm(seen), norm.scale()
    norm.update(numbers(100, seed=1) * 5)
    assert torch.equal(normalised(seen, *scale), before)
    assert not torch.equal(norm(seen), before)


def test_saving_and_loading_keeps_every_bit_now_and_after_more() -> None:
    norm, other, seen = RunningNorm((3,)), RunningNorm((3,)), numbers(50, seed=3)
    norm.update(numbers(100))
    other.load_state_dict(norm.state_dict())
    assert torch.equal(other(seen), norm(seen))
    for each in (norm, other):
        each.update(numbers(10, seed=2))
    assert torch.equal(other(seen), norm(seen))
    other.load_state_dict(RunningNorm((3,)).state_dict())
    assert torch.equal(other(seen), seen.clamp(-CLIP, CLIP))
