"""A pipeline that is not flushed between batches: its order, delays, gradients and steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from atoll.config import MeshShape, TrainTable
from atoll.errors import ConfigError, LossNotFinite
from atoll.island.world import build_mesh
from atoll.strategies.inner.options import InnerOptions, PipelineShape, check_axes
from atoll.strategies.inner.pipeline.async_steps import AsyncSteps
from atoll.strategies.inner.pipeline.lookahead import check_lookahead
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate
from atoll.strategies.inner.pipeline.stream import Batch
from atoll.strategies.inner.sharded_optimizer import LocalShard
from atoll.train.optim.muon import muon
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
@pytest.mark.every(2)
def test_a_drained_batch_has_the_gradients_of_one_device(ranks: Ranks, count: int) -> None:
    loss, expected = plain_pipeline("untied")
    words = {"schedule": "async"}
    by_rank = ranks.run(count, steps, "untied", {"pipeline": count}, words, [1, 2, 4, 8])
    for place in range(4):
        found = [one[place] for one in by_rank]
        assert [one for one, _ in found] == pytest.approx([loss] * count, rel=1e-12)
        assert_same(merged([gradient for _, gradient in found]), expected)


@pytest.mark.parametrize("name", ["untied", "perceptron"])
@pytest.mark.every(2)
def test_replicas_of_a_pipeline_average_what_they_compute(ranks: Ranks, name: str) -> None:
    axes = {"pipeline": 2, "replicate": 2}
    expected, found = (
        ranks.run(4, steps, name, axes, {"schedule": schedule}, [2])
        for schedule in ("1f1b", "async")
    )
    for (right,), (own,) in zip(expected, found, strict=True):
        assert own[0] == pytest.approx(right[0], rel=1e-12)
        assert_same(own[1], right[1])


def _replicated(each_step: bool, schedule: str) -> Any:
    def use(member: Member) -> Any:
        found: list[tuple[float, float]] = []
        for step in range(BATCHES):
            found += member.train(1, first=step)
            if each_step:
                member.task.pull()
        return found, member.parameters()

    train = table(optimizer="torch:NAdam", options=NADAM, clip=0.0)
    words: dict[str, Any] = {"schedule": schedule, "microbatches": 2, "cuts": (3,)}
    return led(use, "untied", train, {"pipeline": 2, "replicate": 2}, **words)


def test_replicas_step_alike_without_waiting_for_the_pipe(ranks: Ranks) -> None:
    (expected, weights), *_ = ranks.run(4, _replicated, True, "1f1b")
    (found, same_weights), *_ = ranks.run(4, _replicated, True, "async")
    for place in (0, 1):  # loss and norm
        right = [step[place] for step in expected]
        assert [step[place] for step in found] == pytest.approx(right)
    same(same_weights, weights, within=1e-12)
    first, again = (ranks.run(4, _replicated, False, "async")[0] for _ in range(2))
    same(again[1], first[1], within=0.0)
    assert any(not torch.equal(first[1][name], weights[name]) for name in weights)


Weights = dict[str, Tensor]
Seen = list[tuple[list[Weights], Weights]]
"""Of every batch: the weights of each microbatch, and the gradient."""


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
        weights = [dict(zip(names, (t.clone() for t in own), strict=True)) for own in batch.weights]
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
    weights: Sequence[Sequence[Weights]], microbatches: int
) -> list[dict[str, Tensor]]:
    """Return the gradient of every batch at given weights, in a process with one thread."""
    found = []
    for number, by_microbatch in enumerate(weights):
        model = gpt(layers=5, tie=False)
        parts = [t.chunk(microbatches) for t in batch_for(model, rows=8, seed=number)]
        for own, *part in zip(by_microbatch, *parts, strict=True):
            model.load_state_dict(own, strict=False)
            (model.loss(*part) * (1 / microbatches)).backward()  # type: ignore[no-untyped-call]
        named = model.named_parameters()
        found.append({name: p.grad for name, p in named if p.grad is not None})
    return found


@pytest.mark.parametrize("microbatches", [1, 2, 4])
@pytest.mark.every(2)
def test_gradients_are_exact_at_the_stashed_weights(ranks: Ranks, microbatches: int) -> None:
    by_rank = ranks.run(4, _stashed, microbatches)
    shape = PipelineShape("async", 4)
    for rank, (_, delays, versions) in enumerate(by_rank):
        delay = shape.delay(rank, microbatches=microbatches)
        assert delays[-1] == max(delays) == delay
        assert versions == delay + 1
    weights = [
        [merged([found[n][0][k] for found, _, _ in by_rank]) for k in range(microbatches)]
        for n in range(BATCHES)
    ]
    for rank, (found, _, _) in enumerate(by_rank):
        # only the first microbatches arrive before the update of the batch before
        lacking = [max(0, -(-(3 - rank - k) // microbatches)) for k in range(microbatches)]
        assert max(lacking) == shape.delay(rank, microbatches=microbatches)
        for own, _ in found[4:]:
            old = [any(not torch.equal(part[n], own[-1][n]) for n in part) for part in own]
            assert old == [updates != lacking[-1] for updates in lacking]
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


def _led(
    schedule: str, each_step: bool, clip: float, count: int, *, train: TrainTable | None = None
) -> Any:
    def use(member: Member) -> Any:
        found: list[tuple[float, float]] = []
        for step in range(BATCHES):
            found += member.train(1, first=step)
            if each_step:
                member.task.pull()
        state = member.task.optimizer.state_dict()["state"]
        counts = sorted({int(own["step"]) for own in state.values() if "step" in own})
        return found, member.parameters(), counts

    train = train or table(optimizer="torch:NAdam", options=NADAM, clip=clip)
    words: dict[str, Any] = {
        "schedule": schedule,
        "microbatches": 4,
        "cuts": tuple(range(2, 1 + count)),
    }
    return led(use, "untied", train, {"pipeline": count}, **words)


@pytest.mark.parametrize("optimizer", ["torch:NAdam", "muon"])
@pytest.mark.every(2)
def test_without_delay_it_is_the_synchronous_method(ranks: Ranks, optimizer: str) -> None:
    train = table(optimizer=optimizer, clip=0.0)
    expected, _ = ranks.run(2, partial(_led, train=train), "1f1b", False, 0.0, 2)
    found, _ = ranks.run(2, partial(_led, train=train), "async", True, 0.0, 2)
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


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_nesterov_steps_as_the_paper_says_at_any_delay(delay: int) -> None:
    """Ajanthan et al., eq. 10: w' = w + d - eta (1 - gamma) g(w + d of `delay` steps ago)."""
    gamma, eta, curvature = 0.9, 0.05, torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64)
    start = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    before = weights = start
    points: list[Tensor] = []
    parameter = torch.nn.Parameter(start.clone())
    kept: list[Tensor] = []
    optimizer = torch.optim.SGD([parameter], lr=eta * (1 - gamma), momentum=gamma, nesterov=True)
    for step in range(40):
        ahead = weights + gamma * (weights - before)
        points.append(ahead)
        late = points[max(0, step - delay)]
        before, weights = weights, ahead - eta * (1 - gamma) * curvature * late
        kept.append(parameter.detach().clone())
        assert torch.allclose(kept[-1], ahead, atol=1e-12)
        parameter.grad = curvature * kept[max(0, step - delay)]
        optimizer.step()


def test_optimizers_without_a_look_ahead_are_refused() -> None:
    weights: Sequence[Tensor] = [torch.zeros(2, requires_grad=True)]
    for optimizer in (torch.optim.AdamW(weights), torch.optim.SGD(weights, lr=1.0, momentum=0.9)):
        with pytest.raises(ConfigError, match=r'"muon"[\s\S]*torch:NAdam[\s\S]*"1f1b"'):
            check_lookahead(optimizer)
    check_lookahead(muon(gpt(tie=False)))
    with pytest.raises(ConfigError, match="looks ahead"):
        check_lookahead(muon(gpt(tie=False), options={"nesterov": False}))
    check_lookahead(torch.optim.SGD(weights, lr=1.0, momentum=0.9, nesterov=True))


def test_half_precision_with_a_scale_is_refused() -> None:
    options = InnerOptions(shape=MeshShape(pipeline=2), schedule="async", precision="fp16")
    with pytest.raises(ConfigError, match="no common scale"):
        check_axes(options)
    check_axes(dataclasses.replace(options, precision="bf16"))
