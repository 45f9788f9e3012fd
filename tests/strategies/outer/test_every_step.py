from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep
from atoll.strategies.outer.base import ScaledRate
from tests.contracts.strategy_suite import (
    Run,
    StrategySuite,
    adamw,
    batches,
    sgd,
    small_model,
    squared_error,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S


def whole_batches(members: int, steps: int, *, rates: list[float]) -> Tensor:
    """Return one model trained on the members' batches put together."""
    model = small_model()
    optimizer, streams = adamw(model), [batches(slot) for slot in range(members)]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rates[step]
        parts = [next(stream) for stream in streams]
        whole = tuple(torch.cat(side) for side in zip(*parts, strict=True))
        optimizer.zero_grad()
        squared_error(model, (whole[0], whole[1]))[0].backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


class TestEveryStep(StrategySuite):
    name = "every_step"
    options = EveryStep()

    def reference(self, members: int, steps: int) -> Tensor:
        """One model on the members' batches put together."""
        return whole_batches(members, steps, rates=[0.02] * steps)


class TestScaled(StrategySuite):
    """The rate grows to the number of members within four steps; resuming goes on with it."""

    name = "every_step_scaled"
    options = EveryStep(lr_scaling="linear", lr_warmup=4)

    def reference(self, members: int, steps: int) -> Tensor:
        """The same, with the rate of each step."""
        reached = [min(1.0, (step + 1) / 5) for step in range(steps)]
        rates = [0.02 * (1 + (members - 1) * share) for share in reached]
        return whole_batches(members, steps, rates=rates)


def sgd_with(lr: float, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


@pytest.mark.parametrize("members", [2, 3])
def test_a_sum_is_the_average_with_so_many_times_the_rate(members: int) -> None:
    train = partial(train_together, members=members, steps=8, clip=0.0)
    summed = train(EveryStep(reduction="sum"), optimizer=sgd)
    faster = train(EveryStep(), optimizer=partial(sgd_with, 0.05 * members))
    scaled = train(EveryStep(lr_scaling="linear"), optimizer=sgd)
    torch.testing.assert_close(summed[0].vector(), faster[0].vector(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(scaled[0].vector(), faster[0].vector(), rtol=1e-5, atol=1e-6)
    plain = train(EveryStep(), optimizer=sgd)
    assert not torch.allclose(summed[0].vector(), plain[0].vector(), atol=1e-3)


def test_a_sum_leaves_buffers_to_be_averaged() -> None:
    settings: dict[str, Any] = {
        "members": 2, "steps": 1, "model": small_model(normalised=True), "clip": 0.0,
    }  # fmt: skip
    summed = train_together(EveryStep(reduction="sum"), **settings)
    plain = train_together(EveryStep(), **settings)
    for ours, theirs in zip(summed[0].task.buffers(), plain[0].task.buffers(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5**s),
    ],
    ids=["from the last rate", "from the first rate"],
)
def test_schedulers_never_see_the_scaled_rate(schedule: Any) -> None:
    def member(group: Group) -> tuple[list[float], list[float]]:
        run = start_run(EveryStep(lr_scaling="sqrt"), group, int(group.me[1:]), optimizer=sgd)
        optimizer = run.task.optimizer
        run.task.scheduler = schedule(optimizer)
        used: list[float] = []
        optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
        kept = []
        for _ in range(3):
            run.train(1)
            kept.append(optimizer.param_groups[0]["lr"])
        return used, kept

    for used, kept in MemoryGroups(4).together(member):
        assert used == pytest.approx([2 * 0.05 * 0.5**step for step in range(3)])
        assert kept == pytest.approx([0.05 * 0.5 ** (step + 1) for step in range(3)])


def test_the_rate_follows_the_members_that_are_left() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)
    used: list[float] = []

    def member(group: Group) -> Run:
        run = start_run(EveryStep(lr_scaling="linear"), group, int(group.me[1:]), optimizer=sgd)
        if group.me == "w0":
            run.task.optimizer.register_step_pre_hook(
                lambda o, *_: used.append(o.param_groups[0]["lr"])
            )
        run.train(2)
        if group.me == "w1":
            groups.kill("w1")
        run.train(2)
        return run

    groups.run(member)
    assert used == pytest.approx([0.15, 0.15, 0.10, 0.10])


def test_a_rate_that_is_a_tensor_is_put_back_as_it_was() -> None:
    parameter, rate = nn.Parameter(torch.ones(1)), torch.tensor(0.5)
    optimizer = torch.optim.SGD([parameter], lr=rate)
    scaled = ScaledRate("linear", warmup=0)
    scaled.attach(optimizer)
    scaled.set(4, step=0)
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert parameter.item() == -1.0
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (EveryStep(reduction="averag"), "did you mean 'average'"),
        (EveryStep(lr_scaling="liner"), "did you mean 'linear'"),
        (EveryStep(lr_warmup=3), "lr_warmup needs lr_scaling"),
        (EveryStep(lr_warmup=-1, lr_scaling="sqrt"), "negative"),
        (EveryStep(reduction="sum", lr_scaling="linear"), "one of the two"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: EveryStep, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        options.build()
