from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.methods.periodic import Average, DiLoCo, SlowMo
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    batches,
    start_run,
    train_together,
)


class TestSlowMo(StrategySuite):
    name = "slowmo"
    options = SlowMo(every=3, slow_momentum=0.6, slow_lr=0.9)

    def same_as_plain(self) -> Any:
        return SlowMo(every=3, slow_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta, gamma = those.vectors()[0], 0.02
        u = torch.zeros_like(theta)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                u = 0.6 * u + (theta - torch.stack(those.vectors()).mean(0)) / gamma
                theta = theta - 0.9 * gamma * u
                those.assign(theta)
        return theta


def test_without_slow_momentum_it_is_local_sgd_bit_for_bit() -> None:
    slow = train_together(SlowMo(every=3, slow_momentum=0.0), members=3, steps=10)
    local = train_together(Average(every=3), members=3, steps=10)
    assert torch.equal(slow[0].vector(), local[0].vector())


def test_with_a_constant_rate_it_is_diloco_with_heavy_ball() -> None:
    slow = train_together(SlowMo(every=3, slow_momentum=0.9, slow_lr=0.7), members=2, steps=12)
    options = DiLoCo(every=3, outer_optimizer="momentum", outer_momentum=0.9, outer_lr=0.7)
    heavy = train_together(options, members=2, steps=12)
    assert torch.equal(slow[0].vector(), heavy[0].vector())


def test_a_falling_rate_divides_each_move_by_its_own_rate() -> None:
    """`u` is kept in units of the rate: gamma_2 u_2 = beta (gamma_2 / gamma_1) x_1 + x_2."""
    run = start_run(SlowMo(every=1, slow_momentum=0.5), SingleGroup(), 0, optimizer=falling)
    start = run.vector().double()
    run.train(1)
    first = start - run.vector()
    run.task.optimizer.param_groups[0]["lr"] = 0.01
    middle = run.vector().double()
    plain = start_run(Average(every=1), SingleGroup(), 0, optimizer=falling)
    with torch.no_grad():
        for ours, theirs in zip(run.task.parameters(), plain.task.parameters(), strict=True):
            theirs.copy_(ours)
    plain.task.optimizer.param_groups[0]["lr"] = 0.01
    plain.stream = run.stream
    plain.train(1)
    moved = middle - plain.vector()
    run.stream = batches(0, start=1)
    run.train(1)
    expected = middle - (0.5 * (0.01 / 0.05) * first + moved)
    assert (run.vector() - expected).abs().max() < 1e-6


def falling(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_a_rate_of_zero_averages_plainly() -> None:
    run = start_run(SlowMo(every=1, slow_momentum=0.5), SingleGroup(), 0)
    run.train(2)
    run.task.optimizer.param_groups[0]["lr"] = 0.0
    before = run.vector()
    run.train(1)
    assert torch.equal(run.vector(), before), "with no rate nothing moved, so nothing is added"


@pytest.mark.parametrize(
    "options", [SlowMo(every=0), SlowMo(slow_lr=0.0), SlowMo(slow_momentum=1.0), SlowMo(rate=-1.0)]
)
def test_options_out_of_range_are_refused(options: SlowMo) -> None:
    with pytest.raises(ConfigError):
        options.build()
