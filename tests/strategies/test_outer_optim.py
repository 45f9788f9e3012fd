from __future__ import annotations

import pytest
import torch

from atoll.errors import ConfigError
from atoll.strategies.outer_optim import OuterSGD


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.9, 0.5), (1.0, 0.0), (0.3, 0.0)])
def test_outer_steps_equal_torch_bit_for_bit(lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(1)
    ours = torch.randn(1_003, generator=generator)
    theirs = torch.nn.Parameter(ours.clone())
    outer = OuterSGD(lr=lr, momentum=momentum)
    torchs = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for _ in range(15):
        g = torch.randn(1_003, generator=generator)
        theirs.grad = g.clone()
        outer.step(ours, g)
        torchs.step()
        assert torch.equal(ours, theirs.detach())


def test_equal_gradients_move_as_the_nesterov_sequence_says() -> None:
    outer, theta = OuterSGD(lr=0.7, momentum=0.9), torch.zeros(1, dtype=torch.float64)
    moves = []
    for _ in range(200):
        before = theta.clone()
        outer.step(theta, torch.ones(1, dtype=torch.float64))
        moves.append(float(before - theta))
    assert moves[:3] == pytest.approx([1.33, 1.897, 2.4073])
    assert moves[-1] == pytest.approx(7.0, rel=1e-6)


def test_saved_velocity_continues_bit_for_bit() -> None:
    first, second = OuterSGD(lr=0.7, momentum=0.9), OuterSGD(lr=0.7, momentum=0.9)
    a = torch.ones(5)
    first.step(a, torch.full((5,), 0.3))
    second.load_state_dict(first.state_dict())
    b = a.clone()
    first.step(a, torch.full((5,), 0.1))
    second.step(b, torch.full((5,), 0.1))
    assert torch.equal(a, b)


@pytest.mark.parametrize(("lr", "momentum"), [(0.0, 0.9), (0.7, 1.0), (0.7, -0.1)])
def test_numbers_that_cannot_work_are_refused(lr: float, momentum: float) -> None:
    with pytest.raises(ConfigError, match="outer optimizer"):
        OuterSGD(lr=lr, momentum=momentum)
