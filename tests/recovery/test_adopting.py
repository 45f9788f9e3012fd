"""The state of a real training, given over a real hub and taken over bit for bit, or refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import atoll
from atoll.codec import make_codec
from atoll.errors import CheckpointError
from atoll.group.single import SingleGroup
from atoll.recovery import Recovered
from atoll.strategies.base import Outer
from atoll.task import Task
from atoll.train.state.committed import CommittedState, adopt
from tests.contracts.strategy_suite import Run, adamw, small_model, start_run
from tests.patience import PATIENCE_S
from tests.recovery.world import World

OPTIONS = atoll.DiLoCo(every=4)


def trained(*, hidden: int = 3) -> Run:
    model = small_model(normalised=True) if hidden == 3 else other_model(hidden)
    run = start_run(OPTIONS, SingleGroup(), 0, model=model)
    run.train(10)  # two steps into the third period
    return run


def other_model(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def newcomer() -> tuple[Task, Outer]:
    model = small_model(seed=99, normalised=True)
    task, outer = Task(model, adamw(model), member="w3"), OPTIONS.build()
    outer.setup(task, group=SingleGroup(me="w3"), codec=make_codec("fp32"))
    return task, outer


def taken_over(found: Recovered) -> tuple[Task, Outer]:
    assert found.shared is not None
    task, outer = newcomer()
    adopt(task, outer, shared=found.shared, inner=found.inner)
    return task, outer


def state_of(run: Run) -> CommittedState:
    return CommittedState(run.task, run.outer)


def test_newcomer_gets_the_donors_round_while_they_train(world: World) -> None:
    run = trained()
    world.round = run.task.round
    base = state_of(run).base
    world.offer("w0", state_of(run))
    world.state_locks["w0"] = state_lock = run.task.state_lock
    world.donors["w0"].offer(state_of(run), still=state_lock.still)
    done = threading.Event()

    def train() -> None:
        for _ in range(1):  # the third period has one more step before its round
            with state_lock.moving():
                run.train(1)
        done.wait(PATIENCE_S)

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        found = world.recover()
    finally:
        done.set()
        trainer.join()
    task, outer = taken_over(found)
    assert (task.round, task.step) == (run.task.round, 8)
    assert found.base == base == outer.committed(task).base
    committed = run.outer.committed(run.task).tensors
    assert committed is not None
    assert all(map(torch.equal, task.parameters(), committed))


def test_state_of_another_shape_asks_the_next_donor(
    world: World,
) -> None:
    """Digests do not show it: the member that loads it does, and names whom to distrust."""
    run, other = trained(), trained(hidden=4)
    world.round = run.task.round
    world.offer("w0", state_of(other))
    world.offer("w1", state_of(run))
    world.gone.add("w1")
    first = world.recover()
    with pytest.raises(CheckpointError, match="does not fit here"):
        taken_over(first)
    world.gone.clear()
    second = world.recover(distrusted=first.sources)
    assert second.sources == ["w1"]
    task, _ = taken_over(second)
    assert task.round == run.task.round
