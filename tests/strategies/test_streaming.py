from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.group.group import Group
from atoll.group.memory import MemoryGroups
from atoll.strategies.outer.diloco import DiLoCo
from atoll.strategies.outer.streaming import Streaming
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    plain_training,
    start_run,
    train_together,
)

FIRST = slice(0, 18)
"""Of the suite's model: what the first fragment of two has."""
SECOND = slice(18, 26)


def formula(members: int, steps: int, options: Streaming) -> Tensor:
    """Return the common parameters by the paper's algorithm, in double precision."""
    those = Reference.make(members, adamw)
    theta, parts = those.vectors()[0], [FIRST, SECOND]
    velocity: list[Tensor | None] = [None, None]
    last, sent = [0, 0], None
    half, delay, alpha = options.every // 2, options.delay, options.mix

    def outer(p: int, mean: Tensor, mix: float) -> None:
        before = velocity[p]
        now = mean if before is None else options.outer_momentum * before + mean
        velocity[p] = now
        theta[parts[p]] -= options.outer_lr * (mean + options.outer_momentum * now)
        for model, vector in zip(those.models, those.vectors(), strict=True):
            vector[parts[p]] = mix * vector[parts[p]] + (1 - mix) * theta[parts[p]]
            torch.nn.utils.vector_to_parameters(vector.float(), model.parameters())

    def mean_of(p: int) -> Tensor:
        return torch.stack([theta[parts[p]] - v[parts[p]] for v in those.vectors()]).mean(0)

    for step in range(1, steps + 1):
        for member in range(members):
            those.gradient_step(member)
        if step % half == 0:
            p = (step // half - 1) % 2
            sent, last[p] = (step, p, mean_of(p)), step
        if sent is not None and (step == sent[0] + delay or step == steps):
            outer(sent[1], sent[2], alpha)
            sent = None
    rest = [(p, mean_of(p)) for p in (0, 1) if last[p] < steps]
    for p, mean in rest:
        outer(p, mean, 0.0)
    return theta


class TestStreaming(StrategySuite):
    name = "streaming"
    options = Streaming(every=4, fragments=2, delay=1, mix=0.5)
    identical = False

    def same_as_plain(self) -> Any:
        return Streaming(every=4, fragments=2, delay=0, mix=0.0, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, self.options)


class TestStreamingLate(StrategySuite):
    """A longer delay, an earlier stop of mixing, neighbours together, a coarse codec."""

    name = "streaming_late"
    options = Streaming(every=6, fragments=2, delay=2, mix=0.25, pattern="sequential", outer_lr=0.7)
    codec = "int8"
    identical = False

    def same_as_plain(self) -> Any:
        return replace(self.options, delay=0, mix=0.0, outer_lr=1.0, outer_momentum=0.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(members, steps, self.options)


def diloco_like(**settings: Any) -> Streaming:
    return Streaming(delay=0, mix=0.0, outer_lr=0.7, outer_momentum=0.9, **settings)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(diloco_like(every=3, fragments=1), id="one fragment"),
        pytest.param(diloco_like(every=3, fragments=2, staggered=False), id="all at once"),
    ],
)
def test_one_fragment_or_equal_offsets_are_diloco_bit_for_bit(options: Streaming) -> None:
    streaming = train_together(options, members=3, steps=10)
    diloco = train_together(DiLoCo(every=3), members=3, steps=10)
    for ours, theirs in zip(streaming, diloco, strict=True):
        assert torch.equal(ours.vector(), theirs.vector())
        assert ours.losses == theirs.losses
        assert all(map(torch.equal, ours.rounds, theirs.rounds))


def test_members_that_keep_their_own_parameters_train_independently() -> None:
    options = Streaming(every=4, fragments=2, delay=1, mix=1.0)

    def body(group: Group) -> Tensor:
        run = start_run(options, group, 0)
        run.train(9)
        return run.vector()

    for vector in MemoryGroups(2).together(body):
        assert torch.equal(vector, plain_training(9))


def test_no_round_but_the_last_is_larger_than_a_share_of_dilocos() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])

    def body(group: Group) -> Run:
        task_model = torch.nn.Sequential(torch.nn.Linear(5, 8), *model, torch.nn.Linear(8, 2))
        run = start_run(Streaming(every=8, fragments=2), group, 0, model=task_model)
        run.train(8)
        return run

    runs = MemoryGroups(2).together(body)
    whole = 4 * sum(p.numel() for p in runs[0].task.parameters())
    sizes = [result.sent_bytes for result in runs[0].results]
    assert sizes
    assert max(sizes) <= whole / 2 + 4 * 40, "layers are dealt whole: the ends differ by a layer"
