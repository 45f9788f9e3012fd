from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.strategies.outer.outer_optimizers import OuterOptimizer, OuterSGD, make_outer_optimizer


def assert_equal_to(theirs: torch.optim.Optimizer, ours: OuterOptimizer, *, steps: int) -> None:
    """Take the same steps with both, from where torch's only parameter stands."""
    parameter = theirs.param_groups[0]["params"][0]
    theta = parameter.detach().clone()
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        g = torch.randn(theta.shape, generator=generator)
        parameter.grad = g.clone()
        theirs.step()
        ours.step(theta, g)
        assert torch.equal(theta, parameter.detach())


def start() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(1_003, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.9, 0.5), (1.0, 0.0), (0.3, 0.0)])
def test_outer_steps_equal_torch_bit_for_bit(lr: float, momentum: float) -> None:
    torchs = torch.optim.SGD([start()], lr=lr, momentum=momentum, nesterov=momentum > 0)
    assert_equal_to(torchs, OuterSGD(lr=lr, momentum=momentum), steps=15)


def test_heavy_ball_equals_torch_bit_for_bit() -> None:
    ours = make_outer_optimizer("momentum", lr=0.7, momentum=0.9)
    assert_equal_to(torch.optim.SGD([start()], lr=0.7, momentum=0.9), ours, steps=10)


def test_adam_equals_torch_bit_for_bit() -> None:
    ours = make_outer_optimizer("adam", lr=0.3, momentum=0.9, eps=0.1)
    torchs = torch.optim.Adam([start()], lr=0.3, betas=(0.9, 0.999), eps=0.1, foreach=False)
    assert_equal_to(torchs, ours, steps=10)


def test_sgd_by_name_has_no_momentum_whatever_its_number() -> None:
    ours = make_outer_optimizer("sgd", lr=0.5, momentum=0.9)
    assert_equal_to(torch.optim.SGD([start()], lr=0.5), ours, steps=4)
    assert make_outer_optimizer("sgd", lr=1.0, momentum=0.9).is_plain


@pytest.mark.parametrize(
    ("name", "options", "arguments"),
    [
        ("NAdam", "betas=(0.8, 0.99), momentum_decay=0.01", {"betas": (0.8, 0.99)}),
        ("RMSprop", "", {}),
        ("SGD", "momentum=0.9, nesterov=True", {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_any_optimizer_of_torch_is_that_of_torch(
    name: str, options: str, arguments: dict[str, Any]
) -> None:
    ours = make_outer_optimizer(f"torch:{name}", lr=0.3, momentum=0.9, options=options)
    more = {"momentum_decay": 0.01} if name == "NAdam" else {}
    torchs = getattr(torch.optim, name)([start()], lr=0.3, **arguments, **more)
    assert_equal_to(torchs, ours, steps=6)


def test_the_common_state_may_be_another_tensor_at_every_step() -> None:
    same, moved = (make_outer_optimizer("torch:NAdam", lr=0.1, momentum=0.0) for _ in range(2))
    a = b = torch.ones(4)
    a = a.clone()
    for size in (0.3, 0.2, -0.1):
        same.step(a, torch.full((4,), size))
        b = b.clone()
        moved.step(b, torch.full((4,), size))
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("NAdm", "", "did you mean 'NAdam'"),
        ("Muon", "", "Muon only supports 2D"),
        ("LBFGS", "", "closure"),
        ("NAdam", "betas=0.9", "torch.optim.NAdam cannot"),
        ("NAdam", "beta=(0.9, 0.99)", "unexpected keyword"),
        ("NAdam", "lr=0.1", r"outer_lr = 0\.1"),
        ("NAdam", "eps=__import__('os')", "cannot be read"),
        ("NAdam", "eps=1)(2", "cannot be read"),
        ("NAdam", "betas={[]: 1}", "cannot be read"),
        ("NAdam", "eps=" + "-" * 5000 + "1", "cannot be read"),
    ],
)
def test_what_torch_cannot_do_is_refused_before_the_run(
    name: str, options: str, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        make_outer_optimizer(f"torch:{name}", lr=0.7, momentum=0.9, options=options)


def test_options_of_another_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"only optimizers of torch\.optim"):
        make_outer_optimizer("adam", lr=0.7, momentum=0.9, options="eps=0.1")


def test_equal_gradients_move_as_the_nesterov_sequence_says() -> None:
    outer, theta = OuterSGD(lr=0.7, momentum=0.9), torch.zeros(1, dtype=torch.float64)
    moves = []
    for _ in range(200):
        before = theta.clone()
        outer.step(theta, torch.ones(1, dtype=torch.float64))
        moves.append(float(before - theta))
    assert moves[:3] == pytest.approx([1.33, 1.897, 2.4073])
    assert moves[-1] == pytest.approx(7.0, rel=1e-6)


NEW: list[Callable[[], OuterOptimizer]] = [
    lambda: OuterSGD(lr=0.7, momentum=0.9),
    lambda: make_outer_optimizer("momentum", lr=0.7, momentum=0.9),
    lambda: make_outer_optimizer("adam", lr=0.3, momentum=0.9),
    lambda: make_outer_optimizer("torch:NAdam", lr=0.3, momentum=0.0),
]


@pytest.mark.parametrize("make", NEW, ids=["nesterov", "momentum", "adam", "torch"])
def test_saved_state_continues_bit_for_bit(make: Callable[[], OuterOptimizer]) -> None:
    first, second = make(), make()
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


@pytest.mark.parametrize("name", ["nesterov", "momentum"])
def test_momentum_of_nothing_is_refused_and_sgd_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match='outer_optimizer = "sgd"'):
        make_outer_optimizer(name, lr=0.7, momentum=0.0)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'nesterov'"):
        make_outer_optimizer("nestrov", lr=0.7, momentum=0.9)


def test_adam_without_an_epsilon_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"outer_eps = 0\.1"):
        make_outer_optimizer("adam", lr=0.7, momentum=0.9, eps=0.0)


def test_every_optimizer_moves_towards_the_members() -> None:
    for make in NEW:
        theta = torch.zeros(3)
        make().step(theta, torch.tensor([1.0, -1.0, 0.5]))
        assert torch.equal(theta.sign(), Tensor([-1.0, 1.0, -1.0]))
