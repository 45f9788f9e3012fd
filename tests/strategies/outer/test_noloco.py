from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.decentralized import NoLoCo
from atoll.methods.periodic import Average
from atoll.strategies.graphs import pairs
from atoll.strategies.outer.noloco import OWN_SLOW
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    sgd,
    start_run,
    train_together,
)
from tests.strategies.outer.test_gossip import assign, deviation


class TestNoLoCo(StrategySuite):
    """Members carry models of their own; round 0 finds that all start alike."""

    name = "noloco"
    options = NoLoCo(every=2)
    identical = False
    tolerance = 5e-6

    def same_as_plain(self) -> Any:
        return NoLoCo(every=2, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        slow = those.vectors()
        momentum = [torch.zeros_like(phi) for phi in slow]
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % 2:
                continue
            deltas = [phi - now for phi, now in zip(slow, those.vectors(), strict=True)]
            partners = pairs(members, round_=step // 2)
            new = []
            for i, j in enumerate(partners):
                delta, mean = (deltas[i] + deltas[j]) / 2, (slow[i] + slow[j]) / 2
                momentum[i] = 0.5 * momentum[i] - 0.7 * delta - 0.9 * (slow[i] - mean)
                new.append(slow[i] + momentum[i])
            slow = new
            assign(those, slow)
        total = sum(those.vectors(), torch.zeros(1))
        assert isinstance(total, Tensor)
        return total / members

    @pytest.mark.skip(reason="the matching goes by place: see test_members_follow_the_formula")
    def test_the_order_of_members_only_reassociates_sums(self) -> None: ...


def test_two_members_without_momentum_average_their_models() -> None:
    options = NoLoCo(every=3, outer_lr=1.0, outer_momentum=0.0, pull=1.0)
    paired = train_together(options, members=2, steps=9)
    averaged = train_together(Average(every=3), members=2, steps=9)
    assert (paired[0].vector() - averaged[0].vector()).abs().max() < 1e-6


def spread(pull: float, *, rounds: int = 30) -> tuple[float, float, Tensor]:
    """Return how far four members are apart before and after, and how far their mean moved."""

    def body(group: Group) -> tuple[Tensor, Tensor]:
        options = NoLoCo(every=1, pull=pull)
        run = start_run(options, group, 0, optimizer=sgd, begin=False)
        with torch.no_grad():
            for parameter in run.task.parameters():
                parameter.add_(float(group.me[1:]))
        for each in run.task.optimizer.param_groups:
            each["lr"] = 0.0
        run.outer.setup(run.task, group=group, codec=make_codec("fp32"))
        before = run.vector()
        run.train(rounds)
        return before, run.vector()

    rows = MemoryGroups(4).together(body)
    before, after = (torch.stack(each).double() for each in zip(*rows, strict=True))
    return deviation(before), deviation(after), before.mean(0) - after.mean(0)


def test_the_pull_brings_members_together_and_their_mean_stays() -> None:
    before, after, moved = spread(0.9)
    assert after < 0.05 * before
    assert moved.abs().max() < 1e-5


def test_without_a_pull_members_stay_apart() -> None:
    before, after, _ = spread(0.0)
    assert after == pytest.approx(before, rel=1e-5)


def test_a_newcomer_copies_the_slow_parameters_of_its_donor() -> None:
    groups = MemoryGroups(2)

    def body(group: Group) -> Any:
        run = start_run(NoLoCo(every=2), group, int(group.me[1:]))
        run.train(5)  # one step past a round
        return run

    donor, _ = groups.together(body)
    copy = start_run(NoLoCo(every=2), groups[1], 1, begin=False)
    copy.task.step, copy.task.round = donor.task.step, donor.task.round
    copy.outer.load_state_dict(donor.outer.shared_state())
    copy.outer.rejoin(copy.task)
    assert torch.equal(copy.vector(), donor.outer.state_dict()[OWN_SLOW])
    assert copy.outer.committed(copy.task).base == donor.outer.committed(donor.task).base


@pytest.mark.parametrize(
    "options",
    [NoLoCo(every=0), NoLoCo(outer_lr=0.0), NoLoCo(outer_momentum=1.0), NoLoCo(pull=3.0)],
)
def test_options_out_of_range_are_refused(options: NoLoCo) -> None:
    with pytest.raises(ConfigError):
        options.build()
