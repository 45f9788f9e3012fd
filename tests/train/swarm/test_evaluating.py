"""Members of a SWARM measure the held-out loss that one process measures of the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from atoll.strategies.inner.swarm.evaluating import hidden_of, measured
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.swarm.places import SwarmSettings
from atoll.train.evaluate import Evaluation, evaluate
from atoll.wire.swarm import HeldOutSum
from tests.strategies.swarm.kit import Batch, batch_of, built, runners, through
from tests.strategies.swarm.kit import Layers as LayersWithDropout
from tests.train.swarm.world import World, expected, held_out_of

COUNT, BETWEEN, END = 6, 3, 5


def made(*, stages: int = 2, steps: int = 4, name: str = "gpt") -> World:
    return World(
        name, SwarmSettings(stages, COUNT, rebalance_s=0), steps, evaluated_every=2,
        held_out=(BETWEEN, END),
    )  # fmt: skip


def start(found: World, members: int) -> World:
    for number in range(members):
        found.start(f"w{number}")
    return found


def world(members: int, **settings: Any) -> World:
    return start(made(**settings), members)


def whole_model(name: str, *, steps: int) -> Any:
    """Return the model after so many steps of one process."""
    model = built(name)
    parameters, _ = expected(name, steps=steps, microbatches=COUNT)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(parameters[key])
    return model


def plainly(model: Any, batches: list[Batch]) -> Evaluation:
    """Return what one process measures."""

    def held_out(*, batch: int, limit_tokens: int | None = None, first: int = 0) -> Iterator[Batch]:
        yield from batches

    return evaluate(model, held_out)


def check_evaluations(found: World, *, within: float) -> None:
    assert [one.step for one in found.evaluations] == [0, 2, 4]
    for one in found.evaluations:
        first, count = (BETWEEN, END) if one.last else (0, BETWEEN)
        batches = [held_out_of(found.name, first + number) for number in range(count)]
        plain = plainly(whole_model(found.name, steps=one.step), batches)
        assert one.total.targets == plain.tokens
        assert one.total.loss_sum == pytest.approx(plain.loss_sum, rel=within)
        assert one.last == (one.step == 4)


@pytest.mark.parametrize("stages", [1, 3])
def test_one_member_per_stage_measures_what_one_process_does(stages: int) -> None:
    found = world(stages, stages=stages)
    found.wait()
    check_evaluations(found, within=1e-6)


def test_members_killed_in_an_evaluation_change_nothing() -> None:
    found, victims = made(), [0, 1]

    def begun() -> bool:
        evaluations, step = found.ledger.evaluations, found.ledger.step
        return bool(evaluations.counted) and not evaluations.complete(step)

    def kill_one() -> bool:
        """Kill a member of each stage; return whether both are killed."""
        if victims and begun():
            found.kill(found.ledger.serving(victims.pop(0))[-1].holder.member)
        return not victims

    found.when(kill_one, then=lambda: None)
    start(found, 6)
    found.wait()
    check_evaluations(found, within=1e-4)


def test_every_weight_is_as_before_after_an_evaluation() -> None:
    plain = World("gpt", SwarmSettings(2, COUNT, rebalance_s=0), 4)  # draws its weights before
    found = world(4)  # threads draw numbers
    for number in range(4):
        plain.start(f"w{number}")
    for one in (found, plain):
        one.wait()
    parameters = plain.parameters()
    for key, value in found.parameters().items():
        assert (value - parameters[key]).abs().max() <= 1e-5 * value.abs().max(), key


def layers(name: str) -> Any:
    torch.manual_seed(5)
    return LayersWithDropout(dropout=0.5)


def test_dropout_is_off_and_running_means_are_used() -> None:
    """And training goes on as before, with dropout."""
    stages = runners("layers", cut=StageCut(stages=2), model=layers)
    for number in range(3):
        through(stages, MicrobatchKey(0, number), batch_of("layers", 0, number))
        for runner in stages:
            runner.fold(MicrobatchKey(0, number))
    for runner in stages:
        runner.apply(runner.gradient()[0])
        runner.begin(1)
    whole = layers("layers")
    state = {n: t for runner in stages for n, t in {
        **runner.stage.parameters(), **runner.stage.buffers(), **runner.stage.untrained()
    }.items()}  # fmt: skip
    whole.load_state_dict(state)
    assert not torch.equal(whole[1].running_mean, torch.zeros(16))
    inputs, targets = batch_of("layers", 0, 9)
    before = [t.clone() for t in state.values()]
    twice = [measured_by(stages, inputs, targets) for _ in range(2)]
    whole.eval()
    with torch.no_grad():
        loss = float(whole.loss(inputs.clone(), targets))
    assert twice[0] == twice[1]
    assert twice[0].loss_sum == pytest.approx(loss * targets.numel(), rel=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(before, state.values(), strict=True))
    for runner in stages:
        assert all(module.training for module in runner.stage.module.modules())


def measured_by(stages: Any, inputs: torch.Tensor, targets: torch.Tensor) -> HeldOutSum:
    values: tuple[torch.Tensor, ...] = (inputs,)
    for runner in stages[:-1]:
        values = hidden_of(runner.stage, values)
    return measured(stages[-1].stage, values, targets)


def test_what_was_frozen_by_hand_stays_so() -> None:
    model = layers("layers")
    stage = ModelStage(model, 0, StageCut(stages=2))
    frozen = next(m for m in stage.module.modules() if isinstance(m, torch.nn.BatchNorm1d))
    frozen.eval()
    hidden_of(stage, (batch_of("layers", 0, 0)[0],))
    assert not frozen.training
    assert stage.module.training


def test_images_are_counted_that_are_classified_correctly() -> None:
    stages = runners("resnet", cut=StageCut(stages=2))
    inputs, targets = batch_of("resnet", 0, 0, rows=12)
    found = measured_by(stages, inputs, targets)
    plain = plainly(built("resnet"), [(inputs, targets)])
    assert (found.targets, found.correct) == (12, plain.correct)
    assert math.isclose(found.loss_sum, plain.loss_sum, rel_tol=1e-6)


def test_targets_that_are_left_out_do_not_count() -> None:
    stages = runners("gpt", cut=StageCut(stages=2))
    inputs, targets = (each.clone() for each in batch_of("gpt", 0, 0))
    targets[:, ::2] = -100
    found = measured_by(stages, inputs, targets)
    plain = plainly(built("gpt"), [(inputs, targets)])
    assert found.targets == plain.tokens == targets.numel() // 2
    assert found.loss_sum == pytest.approx(plain.loss_sum, rel=1e-6)
    assert measured_by(stages, inputs, torch.full_like(targets, -100)) == HeldOutSum(0.0, 0)
