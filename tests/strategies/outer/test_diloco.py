from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.periodic import Average, DiLoCo
from atoll.strategies.outer.diloco import DiLoCoOuter
from atoll.strategies.vectors.masks import lost_updates
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    plain_training,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S


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


class TestDiLoCoAdam(StrategySuite):
    name = "diloco_adam"
    options = DiLoCo(every=3, outer_optimizer="adam", outer_lr=0.3, outer_eps=0.1)

    def same_as_plain(self) -> Any:
        return DiLoCo(every=3, outer_optimizer="sgd", outer_lr=1.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta = those.vectors()[0]
        mean, square, count = torch.zeros_like(theta), torch.zeros_like(theta), 0
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                count += 1
                g = theta - torch.stack(those.vectors()).mean(0)
                mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g * g
                root = (square / (1 - 0.999**count)).sqrt()
                theta = theta - 0.3 * (mean / (1 - 0.9**count)) / (root + 0.1)
                those.assign(theta)
        return theta


class TestDiLoCoTorch(StrategySuite):
    """An optimizer of torch.optim outside."""

    name = "diloco_torch"
    options = DiLoCo(
        every=3, outer_optimizer="torch:RMSprop", outer_lr=0.2, outer_options="alpha=0.9, eps=0.1"
    )

    def same_as_plain(self) -> Any:
        return DiLoCo(every=3, outer_optimizer="sgd", outer_lr=1.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta = those.vectors()[0]
        square = torch.zeros_like(theta)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                g = theta - torch.stack(those.vectors()).mean(0)
                square = 0.9 * square + 0.1 * g * g
                theta = theta - 0.2 * g / (square.sqrt() + 0.1)
                those.assign(theta)
        return theta


class TestDiLoCoDropped(StrategySuite):
    """Updates are lost, and who lost one goes on from its own parameters."""

    name = "diloco_dropped"
    options = DiLoCo(every=2, drop=0.4, drop_seed=5)
    identical = False

    def same_as_plain(self) -> Any:
        return DiLoCo(every=2, drop=0.4, outer_lr=1.0, outer_optimizer="sgd")

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """It also decides which updates are lost: a draw names members, not their data."""
        runs = train_together(self.options, members=3, steps=self.steps, slots=(2, 0, 1))
        expected = self.reference(3, self.steps, names=("w1", "w2", "w0"))
        assert (runs[0].vector().double() - expected).abs().max() < self.tolerance

    def reference(
        self, members: int, steps: int, names: tuple[str, ...] = ("w0", "w1", "w2")
    ) -> Tensor:
        those, names = Reference.make(members, adamw), names[:members]
        theta, velocity, gone = those.vectors()[0], torch.zeros(26), 0
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 2:
                continue
            lost = lost_updates(names, round_=step // 2, probability=0.4, seed=5)
            gone += len(lost)
            deltas = [theta - now for now in those.vectors()]
            there = [d for name, d in zip(names, deltas, strict=True) if name not in lost]
            delta = torch.stack(there).mean(0)
            velocity = 0.9 * velocity + delta
            theta = theta - 0.7 * (delta + 0.9 * velocity)
            for name, model in zip(names, those.models, strict=True):
                if name not in lost:
                    torch.nn.utils.vector_to_parameters(theta.float(), model.parameters())
        assert gone, "this seed loses no update: the test would show nothing"
        return theta


class TestDiLoCoPruned(StrategySuite):
    name = "diloco_pruned"
    options = DiLoCo(every=3, prune=0.5)

    def same_as_plain(self) -> Any:
        return DiLoCo(every=3, outer_optimizer="sgd", outer_lr=1.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        shapes = [parameter.shape for parameter in those.models[0].parameters()]
        theta, velocity = those.vectors()[0], torch.zeros(26)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 3 == 0 or step == steps:
                deltas = [theta - now for now in those.vectors()]
                for delta in deltas:
                    parts = torch.split(delta, [shape.numel() for shape in shapes])
                    for part, shape in zip(parts, shapes, strict=True):
                        half_of_every_neuron(part.view(shape))
                g = torch.stack(deltas).mean(0)
                velocity = 0.9 * velocity + g
                theta = theta - 0.7 * (g + 0.9 * velocity)
                those.assign(theta)
        return theta


def half_of_every_neuron(part: Tensor) -> None:
    """Zero half of each row: those against its sign first, then the smallest."""
    for row in part if part.dim() > 1 else part[None]:
        sign = 1.0 if row.sum() >= 0 else -1.0
        order = sorted(range(len(row)), key=lambda i: (float(row[i]) * sign >= 0, abs(row[i])))
        row[order[: len(row) // 2]] = 0.0


def test_no_lost_updates_are_plain_diloco_bit_for_bit() -> None:
    plain = train_together(DiLoCo(every=3), members=3, steps=9)
    never = train_together(DiLoCo(every=3, drop=1e-12), members=3, steps=9)
    assert torch.equal(plain[0].vector(), never[0].vector())


def test_an_update_that_is_lost_leaves_its_member_where_it_was() -> None:
    options = DiLoCo(every=2, drop=0.5, drop_seed=3)
    lost = [lost_updates(["w0", "w1"], round_=r, probability=0.5, seed=3) for r in range(1, 6)]
    assert any(lost)

    def body(group: Group) -> list[bool]:
        run = start_run(options, group, int(group.me[1:]))
        kept = []
        for _ in range(5):
            run.train(2)
            with run.outer.evaluating(run.task):
                common = run.vector()
            kept.append(not torch.equal(run.vector(), common))
        return kept

    for name, kept in zip(("w0", "w1"), MemoryGroups(2).together(body), strict=True):
        assert kept == [name in there for there in lost]


def test_the_common_parameters_can_be_evaluated_at_any_step() -> None:
    run = start_run(DiLoCo(every=4), MemoryGroups(1)[0], 0)
    run.train(4)
    common = run.vector()
    run.train(2)
    own = run.vector()
    with run.outer.evaluating(run.task):
        assert torch.equal(run.vector(), common)
    assert torch.equal(run.vector(), own)
    assert not torch.equal(own, common)


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


def test_drifted_members_take_the_first_ones_state() -> None:
    def body(group: Group) -> Tensor:
        run = start_run(DiLoCo(every=100, shared_steps=6), group, 0)
        with torch.no_grad():
            run.task.parameters()[0].add_(1e-6 * int(group.me[1:]))
        run.train(6)
        return run.vector()

    assert all(torch.equal(v, plain_training(6)) for v in MemoryGroups(3).together(body))


def test_non_finite_parameters_are_never_averaged() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)

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
def test_rounds_follow_shared_start_warm_up_and_every_h(step: int, due: int) -> None:
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
        DiLoCo(outer_optimizer="nesterov", outer_momentum=0.0),
        DiLoCo(outer_optimizer="adagrad"),
        DiLoCo(drop=1.0),
        DiLoCo(prune=-0.5),
    ],
)
def test_options_out_of_range_are_refused(options: DiLoCo) -> None:
    with pytest.raises(ConfigError):
        options.build()
