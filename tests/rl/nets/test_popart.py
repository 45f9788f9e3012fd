import pytest
import torch
from torch import Tensor

from atoll.rl.nets.value import LARGEST, SMALLEST, PopArt


def head(*, beta: float = 0.05) -> PopArt:
    made = PopArt(6, beta=beta)
    with torch.no_grad():
        made.weight.copy_(torch.randn(7, generator=torch.Generator().manual_seed(1)))
    return made


def values(made: PopArt, features: Tensor) -> Tensor:
    mean, deviation = made.scale()
    weight = made.weight.detach().double()
    return (features.double() @ weight[:-1] + weight[-1]) * deviation + mean


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e3])
def test_values_stay_what_they_were_when_the_scale_moves(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(50, 6, generator=generator)
    made = head()
    made.observe(torch.randn(20, generator=generator) * size)
    for shift in (1.0, -6.0, 20.0):
        before, scale = values(made, features), made.scale()
        made.observe((torch.randn(20, generator=generator) * 5 + shift) * size)
        assert made.scale()[0] != scale[0]
        after = values(made, features)
        assert (after - before).abs().max() <= 1e-6 * before.abs().max()


def test_the_first_batch_sets_the_scale_and_later_ones_move_it() -> None:
    made = head(beta=0.01)
    first = torch.tensor([1.0, 3.0, 5.0, 7.0])
    weight = made.weight.detach().clone()
    made.observe(first)
    mean, deviation = made.scale()
    assert float(mean) == pytest.approx(4.0)
    assert float(deviation) == pytest.approx(5.0**0.5)
    assert torch.equal(made.weight, weight)
    for _ in range(400):
        made.observe(first + 100.0)
    mean, deviation = made.scale()
    assert float(mean) == pytest.approx(104.0, rel=1e-6)
    assert float(deviation) == pytest.approx(5.0**0.5, rel=1e-4)


def test_early_moments_are_the_plain_mean_of_what_was_seen() -> None:
    made = head(beta=1e-6)
    made.observe(torch.tensor([0.0, 2.0]))
    made.observe(torch.tensor([10.0, 12.0]))
    mean, deviation = made.scale()
    assert float(mean) == pytest.approx(6.0, rel=1e-4)
    assert float(deviation) == pytest.approx(26.0**0.5, rel=1e-4)


def test_the_deviation_stays_within_its_limits() -> None:
    flat, steep = head(), head()
    flat.observe(torch.full((8,), 5.0))
    steep.observe(torch.tensor([-1e9, 1e9]))
    assert float(flat.scale()[1]) == SMALLEST
    assert float(steep.scale()[1]) == LARGEST


def test_weights_count_targets() -> None:
    weighed, repeated = head(), head()
    weighed.observe(torch.tensor([1.0, 9.0]), weights=torch.tensor([3.0, 1.0]))
    repeated.observe(torch.tensor([1.0, 1.0, 1.0, 9.0]))
    assert torch.allclose(torch.stack(weighed.scale()), torch.stack(repeated.scale()))


def test_nothing_happens_without_targets() -> None:
    made = head()
    made.observe(torch.zeros(0))
    assert made.fresh


def test_a_new_head_begins_as_the_mean_of_the_others() -> None:
    one, two, new = head(), head(), PopArt(6)
    one.observe(torch.tensor([0.0, 2.0]))
    two.observe(torch.tensor([10.0, 16.0]))
    with torch.no_grad():
        two.weight.mul_(3.0)
    new.begin_like([one, two])
    assert torch.allclose(new.weight, one.weight * 2.0)
    assert [float(number) for number in new.scale()] == pytest.approx([7.0, 2.0])
    assert new.fresh
