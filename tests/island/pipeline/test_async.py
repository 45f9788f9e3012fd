"""A pipeline that is not flushed between batches: its order, delays, gradients and steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from atoll.config import MeshShape
from atoll.errors import ConfigError, LossNotFinite
from atoll.island.world import build_mesh
from atoll.strategies.inner.options import InnerOptions, PipelineShape
from atoll.strategies.inner.pipeline.async_steps import AsyncSteps
from atoll.strategies.inner.pipeline.cuts import check_axes
from atoll.strategies.inner.pipeline.lookahead import check_lookahead
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate
from atoll.strategies.inner.pipeline.stream import Batch
from atoll.strategies.inner.sharded_optimizer import LocalShard
from tests.island.leading import Member, by_itself, led, same, table
from tests.island.pipeline.kit import merged, pipeline, plain_pipeline, steps
from tests.island.pipeline.test_bubble import BACKWARD, FORWARD, WIDTH, Clock, counted_parts
from tests.island.pool import Ranks
from tests.island.reference import CPU, assert_same, batch_for, gpt

BATCHES = 6
NADAM = {"betas": [0.99, 0.999], "decoupled_weight_decay": True}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_only_filling_and_draining_leave_ranks_idle(count: int, microbatches: int) -> None:
    shape = PipelineShape("async", count)
    number = 10 * microbatches
    times = StageTimes(forward_s=[1.0] * count, backward_s=[2.0] * count)
    played = simulate(shape, times, microbatches=number)
    assert played.wall_s == pytest.approx((number + count - 1) * 3.0)
    assert played.bubble == pytest.approx((count - 1) / (number + count - 1))
    assert list(played.held) == [shape.held(rank, microbatches=number) for rank in range(count)]
    assert shape.bubble(microbatches) == shape.overhead(microbatches) == 0.0


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_the_delay_is_what_the_order_of_work_leaves(count: int, microbatches: int) -> None:
    shape = PipelineShape("async", count)
    for rank in range(count):
        order = shape.order(rank, microbatches=20 * microbatches)
        done = 0
        for work in order:
            batch, place = divmod(work.microbatch, microbatches)
            if work.forward and not place and batch >= count:  # filled
                assert batch - done // microbatches == shape.delay(rank, microbatches=microbatches)
            done += not work.forward
    assert PipelineShape("1f1b", count).delay(0, microbatches=1) == 0


@pytest.mark.parametrize("count", [2, 4])
def test_a_drained_batch_has_the_gradients_of_one_device(ranks: Ranks, count: int) -> None:
    loss, expected = plain_pipeline("untied")
    words = {"schedule": "async"}
    by_rank = ranks.run(count, steps, "untied", {"pipeline": count}, words, [1, 2, 4, 8])
    for place in range(4):
        found = [one[place] for one in by_rank]
        assert [one for one, _ in found] == pytest.approx([loss] * count, rel=1e-12)
        assert_same(merged([gradient for _, gradient in found]), expected)


Seen = list[tuple[dict[str, Tensor], dict[str, Tensor]]]


def _stashed(microbatches: int) -> tuple[Seen, list[int], int]:
    """Return weights and gradients of every batch on this rank, the delays, and the versions."""
    model = gpt(layers=5, tie=False)
    parts = pipeline(model, {"pipeline": 4}, schedule="async", microbatches=microbatches)
    stream = parts.stream
    assert stream is not None
    optimizer = torch.optim.NAdam(parts.parameters().values(), lr=0.05)
    found: Seen = []
    delays: list[int] = []
    begun: dict[int, int] = {}

    def done(batch: Batch) -> None:
        names = parts.parameters()
        weights = dict(zip(names, (t.clone() for t in batch.weights), strict=True))
        gradients = {name: p.grad.clone() for name, p in names.items() if p.grad is not None}
        delays.append(len(found) - begun[id(batch)])
        found.append((weights, gradients))
        stream.protect()
        optimizer.step()
        optimizer.zero_grad()

    batches = [parts.batch(*batch_for(model, rows=8, seed=n)) for n in range(BATCHES)]
    for batch in batches:
        begun[id(batch)] = len(found)
        stream.feed(batch, done)
    stream.drain(done)
    return found, delays, stream.most_versions


def _by_autograd(
    weights: Sequence[Mapping[str, Tensor]], microbatches: int
) -> list[dict[str, Tensor]]:
    """Return the gradient of every batch at given weights, in a process with one thread."""
    found = []
    for number, own in enumerate(weights):
        model = gpt(layers=5, tie=False)
        model.load_state_dict(own, strict=False)
        parts = [t.chunk(microbatches) for t in batch_for(model, rows=8, seed=number)]
        for part in zip(*parts, strict=True):
            (model.loss(*part) * (1 / microbatches)).backward()  # type: ignore[no-untyped-call]
        named = model.named_parameters()
        found.append({name: p.grad for name, p in named if p.grad is not None})
    return found


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_gradients_are_exact_at_the_stashed_weights(ranks: Ranks, microbatches: int) -> None:
    by_rank = ranks.run(4, _stashed, microbatches)
    shape = PipelineShape("async", 4)
    for rank, (_, delays, versions) in enumerate(by_rank):
        delay = shape.delay(rank, microbatches=microbatches)
        assert delays[-1] == max(delays) == delay
        assert versions == delay + 1
    weights = [merged([found[n][0] for found, _, _ in by_rank]) for n in range(BATCHES)]
    (expected,) = ranks.run(1, _by_autograd, weights, microbatches)
    for number, gradients in enumerate(expected):
        found = merged([seen[number][1] for seen, _, _ in by_rank])
        assert list(found) == list(gradients)
        for name, gradient in gradients.items():
            assert torch.equal(found[name], gradient), name


def _counted(count: int, words: dict[str, Any]) -> tuple[float, float]:
    """Return when this rank has done some batches, and how long it worked."""
    clock = Clock()
    parts = counted_parts(clock, count, [1.0] * count, words)
    rows = torch.zeros(8, WIDTH)
    parts.backward(rows, rows)  # finds shapes by a pass of its own
    clock.now = clock.worked = 0.0
    for _ in range(BATCHES):
        if parts.stream is None:
            parts.backward(rows, rows)
        else:
            parts.stream.feed(parts.batch(rows, rows), lambda batch: None)
    if parts.stream is not None:
        parts.stream.drain(lambda batch: None)
    return clock.now, clock.worked


def test_real_ranks_are_idle_only_at_both_ends(ranks: Ranks) -> None:
    count, microbatches = 4, 4
    found = ranks.run(count, _counted, count, {"schedule": "async"})
    work = BATCHES * microbatches * (FORWARD + BACKWARD)
    assert all(worked == work for _, worked in found)
    assert max(ended for ended, _ in found) == work + (count - 1) * (FORWARD + BACKWARD)


def _alone() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Return parameters after steps of one stage, and after those of torch's optimizer."""
    options = InnerOptions(shape=MeshShape(pipeline=1), schedule="async", microbatches=1)
    mesh = build_mesh(options.shape, device=CPU)
    model, plain = gpt(tie=False), gpt(tie=False)
    parts = PipelineParts(model, options, mesh=mesh, device=CPU)
    groups = [list(parts.parameters())]
    own = LocalShard(
        torch.optim.NAdam(model.parameters(), lr=0.01), parts.parameters(), groups=groups, state={}
    )
    taken = AsyncSteps(parts, own, clip=0.0)
    optimizer = torch.optim.NAdam(plain.parameters(), lr=0.01)
    for seed in range(BATCHES):
        batch = batch_for(plain, seed=seed)
        back = taken.step(*batch, rates=[0.01])
        optimizer.zero_grad()
        loss = plain.loss(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert back.loss == loss.item()
    assert parts.stream is not None
    found = {name: p.detach() for name, p in parts.parameters().items()}
    return found, {n: p.detach() for n, p in plain.named_parameters()}, parts.stream.most_versions


def test_one_stage_is_the_plain_optimizer(ranks: Ranks) -> None:
    ((found, expected, versions),) = ranks.run(1, _alone)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert versions == 1


def _led(schedule: str, each_step: bool, clip: float, count: int) -> Any:
    def use(member: Member) -> Any:
        found: list[tuple[float, float]] = []
        for step in range(BATCHES):
            found += member.train(1, first=step)
            if each_step:
                member.task.pull()
        state = member.task.optimizer.state_dict()["state"]
        counts = sorted({int(own["step"]) for own in state.values()})
        return found, member.parameters(), counts

    train = table(optimizer="torch:NAdam", options=NADAM, clip=clip)
    words: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": 4,
        "cuts": tuple(range(2, 1 + count)),
    }
    return led(use, "untied", train, {"pipeline": count}, **words)


def test_without_delay_it_is_the_synchronous_method(ranks: Ranks) -> None:
    expected, _ = ranks.run(2, _led, "1f1b", False, 0.0, 2)
    found, _ = ranks.run(2, _led, "async", True, 0.0, 2)
    for place in (0, 1):  # loss and norm
        right = [step[place] for step in expected[0]]
        assert [step[place] for step in found[0]] == pytest.approx(right)
    same(found[1], expected[1], within=0.0)
    assert found[2] == expected[2] == [BATCHES]


def test_every_batch_is_applied_once_when_it_is_drained(ranks: Ranks) -> None:
    first, *_ = ranks.run(4, _led, "async", False, 0.5, 4)
    again, *_ = ranks.run(4, _led, "async", False, 0.5, 4)
    alone = by_itself("untied", table(optimizer="torch:NAdam", options=NADAM))
    alone.train(BATCHES, first=0)
    losses, parameters, counts = first
    assert counts == [BATCHES]
    same(again[1], parameters, within=0.0)
    assert [loss for loss, _ in losses[:2]] == [losses[0][0]] * 2  # the second is under way
    moved = math.sqrt(
        sum(float((p - parameters[n]).square().sum()) for n, p in alone.parameters().items())
    )
    length = math.sqrt(sum(float(p.square().sum()) for p in parameters.values()))
    assert 0 < moved < 0.1 * length


def _spoilt() -> Any:
    def use(member: Member) -> str:
        member.train(2)
        member.task.pull()
        for parameter in member.task.model.parameters():
            parameter.detach().fill_(math.nan)
        member.task.push()
        with pytest.raises(LossNotFinite) as error:
            member.train(4)
        return str(error.value)

    train = table(optimizer="torch:NAdam", options=NADAM)
    return led(use, "untied", train, {"pipeline": 2}, schedule="async", cuts=(3,))


def test_a_loss_that_is_not_finite_ends_training(ranks: Ranks) -> None:
    message, _ = ranks.run(2, _spoilt)
    assert "not finite" in message


def test_optimizers_without_a_look_ahead_are_refused() -> None:
    weights: Sequence[Tensor] = [torch.zeros(2, requires_grad=True)]
    for optimizer in (torch.optim.AdamW(weights), torch.optim.SGD(weights, lr=1.0, momentum=0.9)):
        with pytest.raises(ConfigError, match=r'torch:NAdam[\s\S]*"1f1b"'):
            check_lookahead(optimizer)
    check_lookahead(torch.optim.SGD(weights, lr=1.0, momentum=0.9, nesterov=True))


def test_half_precision_with_a_scale_is_refused() -> None:
    options = InnerOptions(shape=MeshShape(pipeline=2), schedule="async", precision="fp16")
    with pytest.raises(ConfigError, match="no common scale"):
        check_axes(options)
    check_axes(dataclasses.replace(options, precision="bf16"))
