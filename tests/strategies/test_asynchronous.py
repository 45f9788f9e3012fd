from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.group import Group, Work
from atoll.group.memory import MemoryGroups
from atoll.reducer.server_rules import DelayedNesterov
from atoll.strategies.outer.asynchronous import Asynchronous
from atoll.strategies.outer.diloco import DiLoCo
from atoll.train.committed import CommittedState, adopt
from atoll.wire.serving import Setup
from tests.contracts.strategy_suite import (
    Batch,
    Reference,
    Run,
    StrategySuite,
    adamw,
    plain_training,
    start_run,
    train_together,
)

EVERY, ANCHOR = 3, 6


class Delayed:
    """The paper's server, in double precision."""

    def __init__(self, theta: Tensor, buffer: int) -> None:
        self.theta, self.buffer = theta.clone(), buffer
        self.momentum, self.arrived, self.count = torch.zeros(1), torch.zeros(1), 0

    def arrive(self, delta: Tensor) -> Tensor:
        self.arrived = self.arrived + delta
        step = delta / self.buffer
        if (self.count + 1) % self.buffer == 0:
            self.momentum = 0.9 * self.momentum + self.arrived / self.buffer
            step, self.arrived = step + 0.9 * self.momentum, torch.zeros(1)
        self.count += 1
        self.theta = self.theta - 0.7 * step
        return self.theta


class TestAsynchronous(StrategySuite):
    """Members are equally fast, by the virtual clock; those with lower slots push first."""

    name = "asynchronous"
    options = Asynchronous(every=EVERY, anchor_every=ANCHOR)
    codec = "int8"
    identical = True

    def same_as_plain(self) -> Any:
        return Asynchronous(every=EVERY, anchor_every=ANCHOR, outer_optimizer="sgd", outer_lr=1.0)

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        starts = those.vectors()
        server = Delayed(starts[0], members)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % EVERY and step != steps:
                continue
            for member, now in enumerate(those.vectors()):
                starts[member] = server.arrive(starts[member] - now)
                assign(those.models[member], starts[member])
            if step % ANCHOR == 0:
                starts = [server.theta] * members
                those.assign(server.theta)
        return server.theta

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """It does not: the order of arrival counts. What follows is that of the other order."""
        members, steps = 2, 6
        runs = train_together(self.options, members=members, steps=steps, ids=["w1", "w0"])
        those = Reference.make(members, adamw)
        starts = those.vectors()
        server = Delayed(starts[0], members)
        for step in range(1, steps + 1):
            for member in range(members):
                those.gradient_step(member)
            if step % EVERY == 0:
                found = those.vectors()
                for member in (1, 0):
                    starts[member] = server.arrive(starts[member] - found[member])
                    assign(those.models[member], starts[member])
        assert (runs[0].vector().double() - server.theta).abs().max() < self.tolerance


class TestSpreadOverServers(TestAsynchronous):
    """The same, with the vector on three servers."""

    name = "asynchronous_servers"
    options = Asynchronous(every=EVERY, anchor_every=ANCHOR, servers=3)
    coarse = "feedback(fp16)"


def assign(model: nn.Module, vector: Tensor) -> None:
    Reference([model], [], []).assign(vector)


def test_servers_make_no_difference_to_the_bits() -> None:
    one, three = (
        train_together(
            Asynchronous(every=EVERY, anchor_every=ANCHOR, servers=servers), members=3, steps=10
        )
        for servers in (1, 3)
    )
    assert torch.equal(one[0].vector(), three[0].vector())


def test_arrivals_computed_from_the_same_vector_are_one_outer_step_of_diloco() -> None:
    """With c = 0 the moves of N arrivals add up to one step of Nesterov's momentum on the mean."""
    generator = torch.Generator().manual_seed(1)
    setup = Setup(momentum=0.9, buffer=4, parameters=50)
    rule, ours = DelayedNesterov(setup), torch.randn(50, generator=generator)
    theta = nn.Parameter(ours.clone())
    optimizer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(5):
        deltas = [torch.randn(50, generator=generator) for _ in range(4)]
        for delta in deltas:
            rule.apply(ours, delta.clone(), lr=0.7)
        theta.grad = torch.stack(deltas).mean(0)
        optimizer.step()
        assert (ours - theta.detach()).abs().max() < 2e-6


@pytest.mark.parametrize("activation", [0.0, 0.1, 0.25])
def test_every_arrival_weighs_the_same_and_the_momentum_counts_once(activation: float) -> None:
    """With a momentum that stands still, N arrivals of nothing move it by its whole length."""
    setup = Setup(momentum=0.5, buffer=4, activation=activation, parameters=1)
    rule, theta = DelayedNesterov(setup), torch.zeros(1)
    rule.vectors["momentum"].fill_(2.0)
    moves = []
    for _ in range(4):
        before = theta.clone()
        rule.apply(theta, torch.zeros(1), lr=1.0)
        moves.append(float(before - theta))
    held = sum(move / (0.5 * 2.0) for move in moves[:3])
    last = moves[3] / (0.5 * 1.0)  # the momentum has decayed by then
    assert held + last == pytest.approx(1.0)


def test_one_outer_step_of_equal_members_is_that_of_diloco() -> None:
    ours = train_together(Asynchronous(every=4, anchor_every=4), members=1, steps=4)
    theirs = train_together(DiLoCo(every=4), members=1, steps=4)
    assert (ours[0].vector() - theirs[0].vector()).abs().max() < 1e-6


# ---------------------------------------------------------------------------- speeds


def train_at(
    speeds: Mapping[str, float], options: Asynchronous, *, steps: int, last: int = 0, **more: Any
) -> tuple[list[Run], MemoryGroups]:
    """Train members of different speeds until the schedule is over."""
    groups = MemoryGroups(len(speeds), timeout_s=20.0)
    groups.servers.speeds.update(speeds)

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
    pushes = [member for _, member in groups.servers.log]
    counts = [pushes.count(name) for name in speeds]
    assert max(counts) - min(counts) <= 6
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)


def test_without_dynamic_steps_the_fast_member_pushes_more_often() -> None:
    speeds = {"w0": 1.0, "w1": 0.25}
    options = Asynchronous(every=4, anchor_every=40, dynamic=False)
    _, groups = train_at(speeds, options, steps=40)
    pushes = [member for _, member in groups.servers.log]
    assert pushes.count("w0") >= 3 * pushes.count("w1")


def test_runs_with_different_speeds_are_equal_bit_for_bit() -> None:
    speeds = {"w0": 1.0, "w1": 0.7, "w2": 0.31}
    first, second = (
        train_at(speeds, Asynchronous(every=5, anchor_every=20), steps=40) for _ in range(2)
    )
    assert first[1].servers.log == second[1].servers.log
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
    groups = MemoryGroups(2, timeout_s=20.0)
    groups.servers.speeds["w1"] = 0.2

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
    groups = MemoryGroups(4, timeout_s=30.0)
    groups.servers.speeds.update(speeds)

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
    delayed = Asynchronous(every=10, anchor_every=240, dynamic=False)
    naive = replace(delayed, outer_optimizer="nesterov", outer_lr=0.7 / 4)
    losses = final_loss(delayed), final_loss(naive)
    logging.getLogger(__name__).info("delayed %.4f, naive %.4f", *losses)
    assert losses[1] > 1.05 * losses[0]


# ------------------------------------------------------------------------------ servers


def test_a_server_that_forgets_everything_is_loaded_with_what_was_pulled_last() -> None:
    groups = MemoryGroups(3, timeout_s=20.0)

    def body(group: Group) -> Run:
        run = start_run(Asynchronous(every=2, anchor_every=100), group, int(group.me[1:]))
        run.train(5)
        if group.me == "w1":
            groups.servers.restart()
        run.train(7)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    runs = groups.together(body)
    assert len(runs[0].results) == 2  # one to load the server anew, one at the end
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
    start = plain_training(0)
    assert (runs[0].vector() - start).norm() > 0.1


def test_who_comes_late_takes_the_anchor_and_then_what_the_server_holds() -> None:
    groups = MemoryGroups(2, timeout_s=20.0)
    options = Asynchronous(every=2, anchor_every=100)
    trained, offered = threading.Barrier(2), threading.Barrier(2)
    donors: dict[str, Run] = {}

    def body(group: Group) -> Run:
        run = donors[group.me] = start_run(options, group, int(group.me[1:]))
        run.train(6)
        if group.me == "w0":  # by the virtual clock the other waits for it meanwhile
            trained.wait(20)
            offered.wait(20)
        return finished(run)

    def latecomer() -> Run:
        trained.wait(20)
        group = groups.add()
        run, donor = start_run(options, group, 2, begin=False), donors["w0"]
        group.recover()
        shared, inner = CommittedState(donor.task, donor.outer).parts()
        adopt(run.task, run.outer, shared=shared, inner=inner)
        group.standing(run.task.round, base=run.outer.committed(run.task).base)
        anchor = run.vector()
        run.train(1)
        assert torch.equal(run.vector(), groups.servers.server().theta)
        assert not torch.equal(run.vector(), anchor)
        offered.wait(20)
        return finished(run)

    def finished(run: Run) -> Run:
        run.train(6)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    late = Work.start(latecomer, name="late")
    runs = [*groups.together(body, timeout_s=40), late.wait(40)]
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
    assert {run.results[-1].contributors for run in runs} == {("w0", "w1", "w2")}


def test_what_is_evaluated_in_between_is_the_same_on_all_members() -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        run = start_run(Asynchronous(every=2, anchor_every=4), group, int(group.me[1:]))
        run.train(5)
        before = run.vector()
        with run.outer.evaluating(run.task):
            inside = run.vector()
        return before, inside, run.vector()

    first, second = MemoryGroups(2).together(body)
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], second[0])
    for before, inside, after in (first, second):
        assert torch.equal(before, after)
        assert not torch.equal(before, inside)


def test_late_moves_are_dropped_beyond_the_limit() -> None:
    speeds = {"w0": 1.0, "w1": 1.0, "w2": 0.1}
    options = Asynchronous(every=2, anchor_every=60, dynamic=False, max_staleness=3)
    runs, groups = train_at(speeds, options, steps=30)
    state = groups.servers.server()
    applied, pushed = state.version, len(groups.servers.log)
    assert applied < pushed
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)


@pytest.mark.parametrize(
    "options",
    [
        Asynchronous(every=0),
        Asynchronous(outer_lr=0.0),
        Asynchronous(outer_momentum=1.0),
        Asynchronous(outer_momentum=0.0),
        Asynchronous(outer_optimizer="adamw"),
        Asynchronous(buffer=4, activation=0.3),
        Asynchronous(staleness="cubic"),
        Asynchronous(max_staleness=-1),
        Asynchronous(servers=0),
        Asynchronous(reply="int8"),
    ],
)
def test_options_out_of_range_are_refused(options: Asynchronous) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_robust_aggregation_is_refused() -> None:
    group = MemoryGroups(2)[0]
    group.policy = type(group.policy)(aggregate="median")
    with pytest.raises(ConfigError, match="diloco"):
        start_run(Asynchronous(), group, 0, begin=False)
