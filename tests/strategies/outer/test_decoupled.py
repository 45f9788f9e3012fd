"""Decoupled DiLoCo: own weights, directions apart from lengths, and no member waits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.overlapped import Decoupled, Streaming
from atoll.strategies.outer.decoupled import DecoupledOuter
from tests.contracts.strategy_suite import (
    Reference,
    StrategySuite,
    adamw,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S

TENSORS = ((slice(0, 15), slice(15, 18)), (slice(18, 24), slice(24, 26)))
"""Of the suite's model: weight and bias of each fragment of two."""


def radial(updates: list[Tensor]) -> Tensor:
    """Return the mean direction times the mean length."""
    length = float(torch.stack([update.norm() for update in updates]).mean())
    direction: Tensor = torch.stack([update / update.norm() for update in updates]).mean(0)
    return direction * (length / float(direction.norm()))


def formula(members: int, steps: int, options: Decoupled) -> Tensor:
    """Return the common parameters, in double precision; every result is one step late."""
    those = Reference.make(members, adamw)
    theta = those.vectors()[0]
    velocity: list[Tensor | None] = [None, None]
    last, sent = [0, 0], None
    half = options.every // 2

    def merged(p: int) -> list[Tensor]:
        moved = [theta - vector for vector in those.vectors()]
        return [radial([each[span] for each in moved]) for span in TENSORS[p]]

    def outer(p: int, parts: list[Tensor]) -> None:
        mean, before = torch.cat(parts), velocity[p]
        now = mean if before is None else options.outer_momentum * before + mean
        velocity[p], place = now, slice(TENSORS[p][0].start, TENSORS[p][1].stop)
        theta[place] -= options.outer_lr * (mean + options.outer_momentum * now)
        for model, vector in zip(those.models, those.vectors(), strict=True):
            vector[place] = theta[place]
            torch.nn.utils.vector_to_parameters(vector.float(), model.parameters())

    for step in range(1, steps + 1):
        for member in range(members):
            those.gradient_step(member)
        if step % half == 0:
            p = (step // half - 1) % 2
            sent, last[p] = (step, p, merged(p)), step
        if sent is not None and (step == sent[0] + 1 or step == steps):
            outer(sent[1], sent[2])
            sent = None
    for p, parts in [(p, merged(p)) for p in (0, 1) if last[p] < steps]:
        outer(p, parts)
    return theta


class TestDecoupled(StrategySuite):
    name = "decoupled"
    options = Decoupled(every=4, fragments=2, grace=0)
    identical = False

    def same_as_plain(self) -> Any:
        return replace(self.options, delay=0, merge="mean", outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, self.options)


@pytest.mark.parametrize("codec", ["fp32", "feedback(int8)"])
def test_full_quorum_and_no_grace_are_streaming_bit_for_bit(codec: str) -> None:
    own: dict[str, Any] = {"every": 4, "fragments": 2, "delay": 1, "mix": 0.0, "outer_lr": 0.4}
    own |= {"outer_momentum": 0.9, "weight": "tokens"}
    options = Decoupled(merge="mean", grace=0, **own)
    decoupled = train_together(options, members=3, steps=10, codec=codec)
    streaming = train_together(Streaming(**own), members=3, steps=10, codec=codec)
    for ours, theirs in zip(decoupled, streaming, strict=True):
        assert torch.equal(ours.vector(), theirs.vector())
        assert ours.losses == theirs.losses


def test_a_member_goes_on_while_the_round_is_not_over() -> None:
    """w0 is three steps ahead of a round that w1 has not joined yet."""
    options = Decoupled(every=12, fragments=2, delay=1, grace=4)
    ahead = threading.Event()

    def body(group: Group) -> tuple[int, Tensor]:
        run = start_run(options, group, int(group.me[1:]))
        run.train(5)
        if group.me == "w1":
            assert ahead.wait(PATIENCE_S), "w0 waited for w1"
        run.train(1)  # begins the round of the first fragment
        if group.me == "w0":
            run.train(3)
            assert not run.rounds
            ahead.set()
        run.train(12 - run.task.step)
        run.outer.finish(run.task)
        return run.task.round, run.vector()

    found = MemoryGroups(2, timeout_s=PATIENCE_S).together(body)
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_weights_are_quantity_times_tokens_per_own_step() -> None:
    """Twice the batch in equally many steps weighs 4 : 1; half of the steps, 1 : 2."""
    weights = []
    for size, steps in ((4, 4), (8, 4), (4, 2)):
        options = Decoupled(every=100, fragments=2)
        run = start_run(options, SingleGroup(), 0, size=size)
        run.train(steps)
        assert isinstance(run.outer, DecoupledOuter)
        weights.append(run.outer._weighers[0].weight(run.task))
    assert weights == [64.0, 256.0, 32.0]


def test_orthogonal_updates_keep_their_length() -> None:
    outer, parts = radial_outer(), torch.eye(26)[:2]
    sent = [outer.outgoing(0, 3.0 * each[:18].clone()) for each in parts]
    mean = outer.merged(0, (sent[0] + sent[1]) / 2, iter([torch.tensor([3.0, 0.0])]))
    assert float(mean.norm()) == pytest.approx(3.0)
    assert float((3.0 * (parts[0] + parts[1]) / 2).norm()) == pytest.approx(3 / 2**0.5)


def test_cancelling_updates_are_not_stretched() -> None:
    mean = radial_outer().merged(0, torch.full((18,), 1e-6), iter([torch.tensor([3.0, 3.0])]))
    assert float(mean.norm()) < 1e-4


def test_one_members_update_is_what_it_was() -> None:
    outer = radial_outer()
    update = torch.randn(18, generator=torch.Generator().manual_seed(1))
    sent = outer.outgoing(0, update.clone())
    again = outer.merged(0, sent, iter([outer._lengths[0]]))
    assert (again - update).abs().max() < 1e-6


def radial_outer() -> DecoupledOuter:
    outer = start_run(Decoupled(every=8, fragments=2, grace=0), SingleGroup(), 0).outer
    assert isinstance(outer, DecoupledOuter)
    return outer


@pytest.mark.parametrize(
    "options", [Decoupled(grace=-1), Decoupled(merge="median"), Decoupled(weight="size")]
)
def test_options_out_of_range_are_refused(options: Decoupled) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_grace_into_the_next_round_is_refused() -> None:
    with pytest.raises(ConfigError, match="grace = 3"):
        Decoupled(every=10, fragments=2, grace=4).check(nodes=2, min_nodes=2, optimizer="")
