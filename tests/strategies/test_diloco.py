from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError, LossNotFinite
from atoll.group.group import Group
from atoll.group.memory import MemoryGroups
from atoll.strategies.outer.average import Average
from atoll.strategies.outer.diloco import DiLoCo, DiLoCoOuter
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    plain_training,
    start_run,
    train_together,
)


class TestDiLoCo(StrategySuite):
    name = "diloco"
    options = DiLoCo(every=3)
    codec = "int8"

    def same_as_plain(self) -> Any:
        return DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta, velocity = those.vectors()[0], None
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                delta = sum((theta - now for now in those.vectors()), torch.zeros(1)) / members
                velocity = delta if velocity is None else 0.9 * velocity + delta
                theta = theta - 0.7 * (delta + 0.9 * velocity)
                those.assign(theta)
        return theta


class TestDiLoCoWarm(StrategySuite):
    """With averaged warm-up steps."""

    name = "diloco_warm"
    options = DiLoCo(every=4, warmup_steps=5, warmup_every=2, outer_lr=0.9, outer_momentum=0.5)

    def same_as_plain(self) -> Any:
        return DiLoCo(every=4, warmup_steps=5, warmup_every=2, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta, velocity = those.vectors()[0], None
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step in (2, 4, 5):
                theta = sum(those.vectors(), torch.zeros(1)) / members
                those.assign(theta)
            elif step in (9, 10):
                delta = theta - sum(those.vectors(), torch.zeros(1)) / members
                velocity = delta if velocity is None else 0.5 * velocity + delta
                theta = theta - 0.9 * (delta + 0.5 * velocity)
                those.assign(theta)
        return theta


def test_plain_outer_step_is_federated_averaging() -> None:
    averaged = train_together(Average(every=3), members=3, steps=9)
    plain = DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)
    outer = train_together(plain, members=3, steps=9)
    assert torch.equal(averaged[0].vector(), outer[0].vector())


def test_identical_members_equal_one() -> None:
    def body(group: Group) -> Tensor:
        run = start_run(DiLoCo(every=3), group, 0)
        run.train(9)
        return run.vector()

    many = MemoryGroups(4).together(body)
    one = MemoryGroups(1).together(body)
    assert (many[0] - one[0]).abs().max() < 1e-6


def test_outer_state_is_equal_on_all_members() -> None:
    runs = train_together(DiLoCo(every=3), members=3, steps=9, codec="feedback(int8)")
    states = [run.outer.state_dict() for run in runs]
    assert "shared.outer.velocity" in states[0]
    for key in states[0]:
        if key.startswith("shared."):
            assert all(torch.equal(states[0][key], other[key]) for other in states[1:])


def test_members_on_the_same_data_start_together_without_traffic() -> None:
    """The shared start is one member's training; its end costs a comparison of digests."""

    def body(group: Group) -> tuple[Tensor, int]:
        run = start_run(DiLoCo(every=100, shared_steps=6), group, 0)
        before = group.sent_bytes
        run.train(6)
        return run.vector(), group.sent_bytes - before

    for vector, sent in MemoryGroups(3).together(body):
        assert torch.equal(vector, plain_training(6))
        assert sent == 128


def test_members_that_drifted_in_the_shared_start_take_over_the_first_ones_state() -> None:
    def body(group: Group) -> Tensor:
        run = start_run(DiLoCo(every=100, shared_steps=6), group, 0)
        with torch.no_grad():
            run.task.parameters()[0].add_(1e-6 * int(group.me[1:]))
        run.train(6)
        return run.vector()

    assert all(torch.equal(v, plain_training(6)) for v in MemoryGroups(3).together(body))


def test_parameters_that_are_not_finite_are_refused_and_never_averaged() -> None:
    groups = MemoryGroups(2, timeout_s=10.0)

    def body(group: Group) -> Tensor:
        run = start_run(DiLoCo(every=2), group, int(group.me[1:]))
        run.train(1)
        if group.me == "w1":
            with torch.no_grad():
                run.task.parameters()[0].fill_(float("nan"))
            try:
                run.task.step += 1
                run.outer.sync(run.task)
            finally:
                group.close()
        run.train(3)
        return run.vector()

    healthy, sick = groups.run(body)
    assert isinstance(sick, LossNotFinite)
    assert "w1" in str(sick)
    assert "step 2" in str(sick)
    assert isinstance(healthy, Tensor)
    assert torch.isfinite(healthy).all()


@pytest.mark.parametrize(
    ("step", "due"), [(0, 4), (4, 6), (5, 6), (6, 8), (8, 9), (9, 19), (18, 19), (19, 29)]
)
def test_rounds_come_after_the_shared_start_the_warm_up_and_every_h_steps(
    step: int, due: int
) -> None:
    outer = DiLoCoOuter(DiLoCo(every=10, shared_steps=4, warmup_steps=5, warmup_every=2))
    assert outer.next_due(step) == due


@pytest.mark.parametrize(
    "options",
    [
        DiLoCo(every=0),
        DiLoCo(warmup_every=0),
        DiLoCo(outer_lr=0.0),
        DiLoCo(outer_momentum=1.0),
        DiLoCo(weight="size"),
    ],
)
def test_options_out_of_range_are_refused(options: DiLoCo) -> None:
    with pytest.raises(ConfigError):
        options.build()
