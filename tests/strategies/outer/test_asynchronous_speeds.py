"""Members of unlike speeds that push to a server when they like."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.parameter_server import Asynchronous
from tests.contracts.strategy_suite import Batch, Run, start_run
from tests.patience import PATIENCE_S

EVERY, ANCHOR = 3, 6


def train_at(
    speeds: Mapping[str, float], options: Asynchronous, *, steps: int, last: int = 0, **more: Any
) -> tuple[list[Run], MemoryGroups]:
    """Train members of different speeds until the schedule is over."""
    groups = MemoryGroups(len(speeds), timeout_s=PATIENCE_S)
    groups.coordinator.servers.speeds.update(speeds)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), **more)
        run.task.last = steps
        while run.task.step < steps:
            run.train(1)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    return groups.together(body), groups


def test_slow_members_do_fewer_steps_and_all_push_equally_often() -> None:
    speeds = {"w0": 1.0, "w1": 0.5, "w2": 0.25}
    runs, groups = train_at(speeds, Asynchronous(every=8, anchor_every=40), steps=80)
    assert {run.task.step for run in runs} == {80}
    done = [len(run.losses) for run in runs]
    assert done[0] > 1.6 * done[1] > 2.5 * done[2]
    pushes = [member for _, member in groups.coordinator.servers.log]
    counts = [pushes.count(name) for name in speeds]
    assert max(counts) - min(counts) <= 6
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)


def test_without_dynamic_steps_the_fast_member_pushes_more_often() -> None:
    speeds = {"w0": 1.0, "w1": 0.25}
    options = Asynchronous(every=4, anchor_every=40, dynamic=False)
    _, groups = train_at(speeds, options, steps=40)
    pushes = [member for _, member in groups.coordinator.servers.log]
    assert pushes.count("w0") >= 3 * pushes.count("w1")


def test_runs_with_different_speeds_are_equal_bit_for_bit() -> None:
    speeds = {"w0": 1.0, "w1": 0.7, "w2": 0.31}
    first, second = (
        train_at(speeds, Asynchronous(every=5, anchor_every=20), steps=40) for _ in range(2)
    )
    assert first[1].coordinator.servers.log == second[1].coordinator.servers.log
    assert torch.equal(first[0][0].vector(), second[0][0].vector())
    assert [run.losses for run in first[0]] == [run.losses for run in second[0]]


class Clocked:
    """A schedule that counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def test_the_schedule_follows_what_all_have_done() -> None:
    """However few steps a member has done itself, its rates are those of the others."""
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    groups.coordinator.servers.speeds["w1"] = 0.2

    def body(group: Group) -> tuple[int, int, int]:
        run = start_run(Asynchronous(every=5, anchor_every=20), group, int(group.me[1:]))
        run.task.scheduler = clock = Clocked()
        run.task.last = 60
        while run.task.step < 60:
            run.train(1)
        while run.outer.finish(run.task) is not None:
            pass
        return run.task.step, clock.steps, len(run.losses)

    fast, slow = groups.together(body)
    assert fast[:2] == slow[:2] == (60, 60)
    assert slow[2] < 30 < fast[2]


def spiral(slot: int) -> Iterator[Batch]:
    """Yield batches of two spirals, the same distribution for every slot."""
    generator = torch.Generator().manual_seed(slot)
    while True:
        angle = 3.0 * torch.rand(16, generator=generator)
        side = torch.randint(0, 2, (16,), generator=generator).float()
        x = torch.stack(
            [
                angle * torch.cos(2 * angle + 3.14159 * side),
                angle * torch.sin(2 * angle + 3.14159 * side),
            ],
            dim=1,
        )
        rest = 0.1 * torch.randn(16, 3, generator=generator)
        yield torch.cat([x, rest], dim=1), torch.stack([side, 1 - side], dim=1)


def model() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    made = nn.Sequential(
        nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2)
    )
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return made


def final_loss(options: Asynchronous) -> float:
    speeds = {"w0": 1.0, "w1": 0.8, "w2": 0.4, "w3": 0.2}
    groups = MemoryGroups(4, timeout_s=PATIENCE_S)
    groups.coordinator.servers.speeds.update(speeds)

    def body(group: Group) -> nn.Module:
        run = start_run(options, group, int(group.me[1:]), model=model())
        run.stream = spiral(int(group.me[1:]))
        run.task.last = 240
        while run.task.step < 240:
            run.train(1)
        while run.outer.finish(run.task) is not None:
            pass
        return run.task.model

    trained = groups.together(body)[0]
    stream, losses = spiral(99), []
    with torch.no_grad():
        for _ in range(40):
            x, y = next(stream)
            losses.append(float(nn.functional.mse_loss(trained(x), y)))
    return sum(losses) / len(losses)


def test_naive_asynchronous_momentum_is_worse_than_delayed() -> None:
    """With members of different speeds, the same rate and the same momentum."""
    delayed = Asynchronous(every=10, anchor_every=240, dynamic=False, outer_momentum=0.9)
    naive = replace(delayed, outer_optimizer="nesterov", outer_lr=0.7 / 4)
    losses = final_loss(delayed), final_loss(naive)
    logging.getLogger(__name__).info("delayed %.4f, naive %.4f", *losses)
    assert losses[1] > 1.05 * losses[0]


def test_late_moves_are_dropped_beyond_the_limit() -> None:
    speeds = {"w0": 1.0, "w1": 1.0, "w2": 0.1}
    options = Asynchronous(every=2, anchor_every=60, dynamic=False, max_staleness=3)
    runs, groups = train_at(speeds, options, steps=30)
    state = groups.coordinator.servers.server()
    applied, pushed = state.version, len(groups.coordinator.servers.log)
    assert applied < pushed
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
