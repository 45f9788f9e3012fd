"""DES-LOC and MT-DAO: averages of parameters and moments, each at its own period."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.local_moments import MTDAO, DesLoc
from atoll.methods.periodic import Average
from atoll.strategies.vectors.flat import Flat
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    sgd,
    small_model,
    start_run,
    train_together,
)

MEAN, VARIANCE = "exp_avg", "exp_avg_sq"


def formula(
    members: int,
    steps: int,
    *,
    every: int,
    periods: Mapping[str, int],
    slow: tuple[float, float] = (0.0, 0.0),
) -> Tensor:
    """Return the parameters: Adam on every member, averages at multiples of the periods."""
    those = Reference.make(members, adamw)
    beta, omega = slow
    momenta = [torch.zeros(26, dtype=torch.float64) for _ in range(members)]
    for step in range(1, steps + 1):
        for member in range(members):
            those.gradient_step(member)
            if omega:
                turn(those, member, momenta[member], step, beta=beta, omega=omega)
        if step % every == 0 or step == steps:
            those.assign(torch.stack(those.vectors()).mean(0))
        for name, period in periods.items():
            if step % period:
                continue
            if name == "slow":
                mean = torch.stack(momenta).mean(0)
                for momentum in momenta:
                    momentum.copy_(mean)
                continue
            for together in zip(*(o.state.values() for o in those.optimizers), strict=True):
                average = torch.stack([state[name] for state in together]).mean(0)
                for state in together:
                    state[name].copy_(average)
    return those.vectors()[0]


def turn(
    those: Reference, member: int, momentum: Tensor, step: int, *, beta: float, omega: float
) -> None:
    """Move from Adam's step to the one with the slow momentum's share."""
    parameters = list(those.models[member].parameters())
    states = [those.optimizers[member].state[parameter] for parameter in parameters]
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).double()
    momentum.mul_(beta).add_(flat, alpha=1 - beta)
    mean = torch.cat([state[MEAN].flatten() for state in states]).double() / (1 - 0.9**step)
    root = torch.cat([state[VARIANCE].flatten() for state in states]).double()
    root = (root / (1 - 0.95**step)).sqrt() + 1e-8
    move = 0.02 * omega * (mean - momentum / (1 - beta**step)) / root
    there = those.vectors()[member] + move
    Flat(parameters).write(there.float())


class TestDesLoc(StrategySuite):
    name = "desloc"
    options = DesLoc(every=2, momentum_rounds=1, variance_rounds=2, moments="fp32")

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, every=2, periods={MEAN: 2, VARIANCE: 4})


class TestDesLocInBf16(StrategySuite):
    """Moments lose 8 bits of precision on the way, and nothing else."""

    name = "desloc_bf16"
    options = DesLoc(every=3, momentum_rounds=1, variance_rounds=1)
    codec = "int8"
    tolerance = 2e-3

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, every=3, periods={MEAN: 3, VARIANCE: 3})


class TestMTDAO(StrategySuite):
    name = "mtdao"
    options = MTDAO(
        every=2, momentum_rounds=2, variance_rounds=1, moments="fp32", slow_beta=0.98,
        slow_weight=0.6,
    )  # fmt: skip

    def same_as_plain(self) -> Any:
        return MTDAO(every=2, slow_weight=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        periods = {MEAN: 4, VARIANCE: 2, "slow": 2}
        return formula(members, steps, every=2, periods=periods, slow=(0.98, 0.6))


def test_without_moments_it_is_local_sgd_bit_for_bit() -> None:
    options = DesLoc(every=3, momentum_rounds=0, variance_rounds=0)
    without = train_together(options, members=3, steps=10)
    plain = train_together(Average(every=3), members=3, steps=10)
    assert torch.equal(without[0].vector(), plain[0].vector())


def test_with_one_momentum_mt_dao_is_des_loc_bit_for_bit() -> None:
    periods: dict[str, Any] = {"every": 2, "momentum_rounds": 2, "variance_rounds": 1}
    slow = train_together(MTDAO(slow_weight=0.0, **periods), members=3, steps=9)
    base = train_together(DesLoc(**periods), members=3, steps=9)
    assert torch.equal(slow[0].vector(), base[0].vector())


def test_with_equal_periods_members_hold_equal_moments() -> None:
    """Local Adam with averaged moments: after a round members are equal in every way."""
    options = DesLoc(every=3, momentum_rounds=1, variance_rounds=1)
    runs = train_together(options, members=3, steps=9)
    assert torch.equal(moments(runs[0]), moments(runs[2]))
    apart = train_together(DesLoc(every=3, momentum_rounds=0), members=3, steps=9)
    assert not torch.equal(moments(apart[0]), moments(apart[2]))


def moments(run: Run) -> Tensor:
    states = run.task.optimizer.state.values()
    return torch.cat([state[name].flatten() for state in states for name in (MEAN, VARIANCE)])


def test_the_mean_of_moments_over_members_is_conserved() -> None:
    """Averaging changes what members hold, not their mean."""
    options = DesLoc(every=4, momentum_rounds=1, variance_rounds=1, moments="fp32")

    def body(group: Group) -> tuple[Tensor, Tensor]:
        run = start_run(options, group, int(group.me[1:]))
        run.train(3)
        run.inner.step(run.task, next(run.stream), Quiet(run))  # the round is not held yet
        before = moments(run)
        run.outer.sync(run.task)
        return before, moments(run)

    found = MemoryGroups(3).together(body)
    before, after = (torch.stack(each).mean(0) for each in zip(*found, strict=True))
    assert (before - after).abs().max() < 1e-8
    assert not torch.equal(found[0][0], found[0][1])


class Quiet:
    """An outer strategy that holds no round."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run.outer, name)

    def sync(self, task: object) -> None:
        """Hold no round."""


def test_a_joining_member_takes_over_the_averaged_moments() -> None:
    options = DesLoc(every=2, momentum_rounds=1, variance_rounds=1, moments="fp32")
    donors = train_together(options, members=2, steps=4)
    joining = start_run(options, SingleGroup(), 0, begin=False)
    joining.task.step = 4
    joining.outer.load_state_dict(donors[0].outer.shared_state())
    joining.outer.rejoin(joining.task)
    assert torch.equal(moments(joining), moments(donors[0]))
    state = next(iter(joining.task.optimizer.state.values()))
    assert float(state["step"]) == 4.0


def test_small_variances_are_never_rounded_to_zero() -> None:
    runs = train_together(
        DesLoc(every=2, momentum_rounds=1, variance_rounds=1), members=2, steps=4, codec="int2"
    )
    for state in runs[0].task.optimizer.state.values():
        assert (state[VARIANCE] > 0).all()


def test_another_optimizer_than_adam_is_refused() -> None:
    with pytest.raises(ConfigError, match="moments of Adam"):
        start_run(DesLoc(), SingleGroup(), 0, optimizer=sgd)
    with pytest.raises(ConfigError, match='optimizer = "adamw"'):
        MTDAO().check(nodes=2, min_nodes=2, optimizer="muon")


@pytest.mark.parametrize(
    "options",
    [
        DesLoc(every=0),
        DesLoc(momentum_rounds=-1),
        DesLoc(moments="int8"),
        MTDAO(slow_beta=1.0),
        MTDAO(slow_weight=1.5),
        MTDAO(slow_rounds=-1),
    ],
)
def test_options_out_of_range_are_refused(options: DesLoc) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_averages_of_fewer_parameters_are_forgotten() -> None:
    model, group = small_model(), SingleGroup()
    next(model.parameters()).requires_grad_(False)
    options = DesLoc(every=2, momentum_rounds=1, variance_rounds=1)
    run = start_run(options, group, 0, model=model)
    run.train(2)
    for parameter in run.task.model.parameters():
        parameter.requires_grad_(True)
    run.task.exchange([name for name, _ in model.named_parameters()])
    run.outer.setup(run.task, group=group, codec=make_codec("fp32"))
    newcomer = start_run(options, SingleGroup(), 1, begin=False)
    newcomer.outer.load_state_dict(run.outer.shared_state())
    newcomer.outer.rejoin(newcomer.task)
    assert torch.equal(newcomer.vector(), run.vector())
