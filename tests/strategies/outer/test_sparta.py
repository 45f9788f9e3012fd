from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, LossNotFinite
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import Sparta
from atoll.methods.periodic import Average
from atoll.strategies.vectors.masks import Mask
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    small_model,
    start_run,
    train_together,
)


class TestSparta(StrategySuite):
    name = "sparta"
    options = Sparta(probability=0.25, mask="rolled")
    coarse = "bf16"
    identical = False

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        mask = Mask(26, 0.25, "rolled")
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            vectors, positions = those.vectors(), mask.at(step)
            mean = sum(vectors, torch.zeros(1)) / members
            for vector, model in zip(vectors, those.models, strict=True):
                vector[positions] = mean[positions]
                nn.utils.vector_to_parameters(vector.float(), model.parameters())
        return sum(those.vectors(), torch.zeros(1)) / members


class TestSpartaWithOuterSteps(StrategySuite):
    """Together with DiLoCo."""

    name = "sparta_outer"
    options = Sparta(probability=0.1, every=4, outer_lr=0.9, outer_momentum=0.5)
    coarse = "bf16"
    identical = False

    def same_as_plain(self) -> Any:
        return Sparta(probability=0.1)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        mask, theta, velocity = Mask(26, 0.1), those.vectors()[0], None
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            vectors = those.vectors()
            mean = sum(vectors, torch.zeros(1)) / members
            if step % 4 == 0:
                delta = theta - mean
                velocity = delta if velocity is None else 0.5 * velocity + delta
                theta = theta - 0.9 * (delta + 0.5 * velocity)
                those.assign(theta)
                continue
            for vector, model in zip(vectors, those.models, strict=True):
                vector[mask.at(step)] = mean[mask.at(step)]
                nn.utils.vector_to_parameters(vector.float(), model.parameters())
        return sum(those.vectors(), torch.zeros(1)) / members


def test_a_share_of_one_is_averaging_in_every_step() -> None:
    sparse = train_together(Sparta(probability=1.0), members=3, steps=6)
    averaged = train_together(Average(every=1), members=3, steps=6)
    assert (sparse[0].vector() - averaged[0].vector()).abs().max() < 1e-6
    for a, b in zip(sparse[0].rounds, sparse[1].rounds, strict=True):
        assert torch.equal(a, b)


def test_variance_shrinks_by_the_share_per_step() -> None:
    """(1 - p) per step in expectation, over a model large enough for the mean to hold."""
    share, steps, members = 0.2, 8, 4

    def body(group: Group) -> list[Tensor]:
        options = Sparta(probability=share, weight="equal")
        run = start_run(options, group, 0, model=nn.Linear(100, 200))
        slot = int(group.me[1:])
        generator = torch.Generator().manual_seed(slot)
        with torch.no_grad():
            for parameter in run.task.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        found = [run.vector()]
        for _ in range(steps):
            run.task.advance()
            run.outer.sync(run.task)
            found.append(run.vector())
        return found

    vectors = MemoryGroups(members).together(body)
    spread = [torch.stack(at).var(0).mean().item() for at in zip(*vectors, strict=True)]
    for step in range(1, steps + 1):
        assert spread[step] / spread[0] == pytest.approx((1 - share) ** step, rel=0.05)


def test_members_differ_between_rounds_and_end_with_one_model() -> None:
    first, second = train_together(Sparta(probability=0.1), members=2, steps=5)
    assert not torch.equal(first.rounds[-2], second.rounds[-2])
    assert torch.equal(first.vector(), second.vector())
    assert first.results[-1].digest == second.results[-1].digest


def test_the_bytes_are_the_share_of_the_parameters() -> None:
    run = start_run(Sparta(probability=0.01), MemoryGroups(1)[0], 0, model=nn.Linear(400, 100))
    found = run.outer.traffic(40_100, 2, steps=10)
    assert found.relay_sent_bytes == 128 + 10 * 401 * 4 + 4 * 40_100


def test_parameters_that_are_not_finite_are_never_shared() -> None:
    run = start_run(Sparta(probability=1.0), MemoryGroups(1)[0], 0)
    with torch.no_grad():
        run.task.parameters()[0].fill_(float("nan"))
    with pytest.raises(LossNotFinite, match="w0"):
        run.outer.sync(run.task)


def test_who_takes_the_state_over_goes_on_like_its_donor() -> None:
    """Parameters and the shared part are all that a newcomer needs."""
    donor = start_run(Sparta(probability=0.5, every=3), MemoryGroups(1)[0], 0)
    donor.train(4)
    newcomer = start_run(
        Sparta(probability=0.5, every=3), MemoryGroups(1)[0], 0, model=donor.task.model,
        begin=False,
    )  # fmt: skip
    newcomer.outer.load_state_dict(donor.outer.shared_state())
    newcomer.outer.rejoin(newcomer.task)
    assert newcomer.outer.committed(newcomer.task).base == donor.outer.committed(donor.task).base
    assert newcomer.outer.shared_state().keys() == donor.outer.shared_state().keys()


@pytest.mark.parametrize("codec", ["feedback(int8)", "sign", "topk:0.5"])
def test_codecs_that_lose_much_or_remember_are_refused(codec: str) -> None:
    with pytest.raises(ConfigError, match="SPARTA cannot use codec"):
        start_run(Sparta(), MemoryGroups(1)[0], 0, codec=codec, model=small_model())


@pytest.mark.parametrize(
    "options",
    [
        Sparta(probability=0.0),
        Sparta(probability=1.5),
        Sparta(mask="some"),
        Sparta(every=-1),
        Sparta(outer_lr=0.0),
        Sparta(weight="size"),
    ],
)
def test_options_out_of_range_are_refused(options: Sparta) -> None:
    with pytest.raises(ConfigError):
        options.build()
