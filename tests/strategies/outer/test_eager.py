from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.single import SingleGroup
from atoll.methods.overlapped import Eager
from atoll.methods.periodic import DiLoCo
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    small_model,
    start_run,
    train_together,
)


class Nesterov:
    """One sequence of outer steps, in double precision."""

    def __init__(self, theta: Tensor, *, lr: float, momentum: float) -> None:
        self.theta, self._lr, self._momentum = theta.clone(), lr, momentum
        self._velocity = torch.zeros_like(theta)

    def step(self, g: Tensor) -> None:
        self._velocity = self._momentum * self._velocity + g
        self.theta = self.theta - self._lr * (g + self._momentum * self._velocity)


class TestEager(StrategySuite):
    name = "eager"
    options = Eager(every=3, outer_lr=0.7, outer_momentum=0.9)
    codec = "int8"
    identical = False

    def same_as_plain(self) -> Any:
        return Eager(every=3, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        start = those.vectors()[0]
        common = Nesterov(start, lr=0.7, momentum=0.9)
        own = [Nesterov(start, lr=0.7, momentum=0.9) for _ in range(members)]
        before: list[Tensor] = []
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 and step < steps:
                continue
            now = [mine.theta - v for mine, v in zip(own, those.vectors(), strict=True)]
            for member, mine in enumerate(own):
                ahead = now[member] / members
                if before:
                    ahead = ahead + torch.stack(before).mean(0) - before[member] / members
                mine.step(ahead)
                torch.nn.utils.vector_to_parameters(
                    mine.theta.float(), those.models[member].parameters()
                )
            if before:
                common.step(torch.stack(before).mean(0))
            before = now
        common.step(torch.stack(before).mean(0))
        return common.theta


@pytest.mark.parametrize("steps", [9, 11])
def test_one_member_is_diloco_bit_for_bit(steps: int) -> None:
    ends = []
    for options in (Eager(every=3, outer_lr=0.7, outer_momentum=0.9), DiLoCo(every=3)):
        run = start_run(options, SingleGroup(), 0)
        run.train(steps)
        between = run.vector()
        run.outer.finish(run.task)
        ends.append((between, run.vector(), run.losses))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2] == ends[1][2]


def test_members_differ_between_rounds_and_agree_on_what_counts() -> None:
    runs = train_together(Eager(every=3, outer_momentum=0.5), members=3, steps=12)
    middle = [run.rounds[2] for run in runs]
    assert not torch.equal(middle[0], middle[1])
    assert len({run.results[2].digest for run in runs}) == 1
    states = [run.outer.state_dict() for run in runs]
    shared = [key for key in states[0] if key.startswith("shared.")]
    assert "shared.outer.velocity" in shared
    assert all(torch.equal(states[0][key], other[key]) for key in shared for other in states)


@pytest.mark.parametrize(
    "options", [Eager(every=0), Eager(shared_steps=-1), Eager(outer_lr=0.0), Eager(weight="size")]
)
def test_options_out_of_range_are_refused(options: Eager) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_defaults_stay_where_a_period_reaches_the_optimum() -> None:
    """A pseudo-gradient then is the whole distance: the stiffest problem for a late mean."""
    model = torch.nn.Linear(5, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    def steep(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2)

    runs = train_together(Eager(every=10), members=4, steps=400, optimizer=steep, model=model)
    losses = torch.tensor([run.losses for run in runs]).mean(0)
    assert losses[-100:].mean() < 1.2  # 4.1 with an outer rate of 0.7, and rising


def test_velocities_start_anew_with_more_parameters() -> None:
    model, group = small_model(), SingleGroup()
    next(model.parameters()).requires_grad_(False)
    run = start_run(Eager(every=2, outer_momentum=0.9), group, 0, model=model)
    run.train(6)
    run.outer.finish(run.task)
    names = [name for name, _ in model.named_parameters()]
    for parameter in run.task.model.parameters():
        parameter.requires_grad_(True)
    run.task.exchange(names)
    run.outer.setup(run.task, group=group, codec=make_codec("fp32"))
    run.train(6)
    assert len(run.outer.state_dict()["own.outer.velocity"]) == 26
