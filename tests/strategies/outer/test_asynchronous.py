from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.group.base import Group, Work
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.parameter_server import Asynchronous
from atoll.methods.periodic import DiLoCo
from atoll.reducer.update_rules import DelayedNesterov
from atoll.train.state.committed import CommittedState, adopt
from atoll.wire.parameter_server_messages import Setup
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    plain_training,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S

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
    options = Asynchronous(every=EVERY, anchor_every=ANCHOR, outer_momentum=0.9)
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
        runs = train_together(self.options, members=members, steps=steps, slots=(1, 0))
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
    options = Asynchronous(every=EVERY, anchor_every=ANCHOR, outer_momentum=0.9, servers=3)
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


def test_arrivals_from_one_vector_are_a_diloco_step() -> None:
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
def test_arrivals_weigh_the_same_and_momentum_counts_once(activation: float) -> None:
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
    options = Asynchronous(every=4, anchor_every=4, outer_momentum=0.9)
    ours = train_together(options, members=1, steps=4)
    theirs = train_together(DiLoCo(every=4), members=1, steps=4)
    assert (ours[0].vector() - theirs[0].vector()).abs().max() < 1e-6


# ------------------------------------------------------------------------------ servers


def test_forgetful_server_is_loaded_with_the_last_pull() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> Run:
        run = start_run(Asynchronous(every=2, anchor_every=100), group, int(group.me[1:]))
        run.train(5)
        if group.me == "w1":
            groups.coordinator.servers.restart()
        run.train(7)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    runs = groups.together(body)
    assert len(runs[0].results) == 2  # one to load the server anew, one at the end
    assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)
    start = plain_training(0)
    assert (runs[0].vector() - start).norm() > 0.1


def test_latecomer_takes_the_anchor_then_the_server_state() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    options = Asynchronous(every=2, anchor_every=100)
    trained, offered = threading.Barrier(2), threading.Barrier(2)
    donors: dict[str, Run] = {}

    def body(group: Group) -> Run:
        run = donors[group.me] = start_run(options, group, int(group.me[1:]))
        run.train(6)
        if group.me == "w0":  # by the virtual clock the other waits for it meanwhile
            trained.wait(PATIENCE_S)
            offered.wait(PATIENCE_S)
        return finished(run)

    def latecomer() -> Run:
        trained.wait(PATIENCE_S)
        group = groups.add()
        run, donor = start_run(options, group, 2, begin=False), donors["w0"]
        group.recover()
        shared, inner = CommittedState(donor.task, donor.outer).parts()
        adopt(run.task, run.outer, shared=shared, inner=inner)
        group.standing(run.task.round, base=run.outer.committed(run.task).base)
        anchor = run.vector()
        run.train(1)
        assert torch.equal(run.vector(), groups.coordinator.servers.server().theta)
        assert not torch.equal(run.vector(), anchor)
        offered.wait(PATIENCE_S)
        return finished(run)

    def finished(run: Run) -> Run:
        run.train(6)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    late = Work.start(latecomer, name="late")
    runs = [*groups.together(body, timeout_s=PATIENCE_S), late.wait(PATIENCE_S)]
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
    group.aggregation = type(group.aggregation)(aggregate="median")
    with pytest.raises(ConfigError, match="diloco"):
        start_run(Asynchronous(), group, 0, begin=False)
