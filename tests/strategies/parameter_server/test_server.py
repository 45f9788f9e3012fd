from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.config import StrategyTable
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.every_step import EveryStep
from atoll.methods.parameter_server import Server
from atoll.strategies.resolve import resolve
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    batches,
    sgd,
    small_model,
    squared_error,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S


def assign(model: nn.Module, vector: Tensor) -> None:
    Reference([model], [], []).assign(vector)


class TestParameterServer(StrategySuite):
    """Synchronous: the mean of the members' steps, as if their parameters were averaged."""

    name = "server"
    options = Server(anchor_every=4)
    codec = "int8"

    def reference(self, members: int, steps: int) -> Tensor:
        those = Reference.make(members, adamw)
        theta = those.vectors()[0]
        for _ in range(steps):
            for member in range(members):
                those.gradient_step(member)
            theta = sum(those.vectors(), torch.zeros(1)) / members
            those.assign(theta)
        return theta


class TestStaleSynchronous(StrategySuite):
    """Equally fast members: every step counts 1/n as it comes, lower slots first."""

    name = "server_stale"
    options = Server(mode="stale", bound=2, anchor_every=4)

    def reference(self, members: int, steps: int) -> Tensor:
        return one_by_one(members, steps, share=1 / members)

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """It does not: the order of arrival counts, and each goes on from what it found."""
        runs = train_together(self.options, members=2, steps=4, slots=(1, 0))
        expected = one_by_one(2, 4, share=0.5, order=(1, 0))
        assert (runs[0].vector().double() - expected).abs().max() < self.tolerance


class TestAsynchronousServer(StrategySuite):
    name = "server_asynchronous"
    options = Server(mode="asynchronous", anchor_every=4, staleness="inverse", servers=2)
    codec = "int8"
    coarse = "feedback(fp16)"

    def reference(self, members: int, steps: int) -> Tensor:
        return one_by_one(members, steps, share=None)

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """It does not: the order of arrival counts, and each goes on from what it found."""
        runs = train_together(self.options, members=2, steps=4, slots=(1, 0))
        expected = one_by_one(2, 4, share=None, order=(1, 0))
        assert (runs[0].vector().double() - expected).abs().max() < self.tolerance


def one_by_one(
    members: int, steps: int, *, share: float | None, order: tuple[int, ...] = ()
) -> Tensor:
    """Return what pushes of equally fast members come to; without a share late ones count less."""
    those = Reference.make(members, adamw)
    read = those.vectors()
    theta, version, versions = read[0], 0, [0] * members
    for step in range(1, steps + 1):
        for member in range(members):
            those.gradient_step(member)
        found = those.vectors()
        for member in order or range(members):
            factor = share or 1 / max(1, version - versions[member])
            theta = theta - factor * (read[member] - found[member])
            version += 1
            read[member], versions[member] = theta, version
            assign(those.models[member], theta)
        if step % 4 == 0:
            read, versions = [theta] * members, [version] * members
            those.assign(theta)
    return theta


# -------------------------------------------------------------------------- identities


def unclipped(options: Any, *, members: int, steps: int, **more: Any) -> list[Run]:
    return train_together(options, members=members, steps=steps, optimizer=sgd, clip=0.0, **more)


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        (Server(optimizer="sgd", anchor_every=5), "fp32"),
        (Server(optimizer="sgd", anchor_every=5), "fp16"),
        (Server(mode="stale", bound=0, optimizer="sgd", anchor_every=5, servers=2), "fp32"),
    ],
)
def test_gradients_of_one_clock_are_data_parallel_bit_for_bit(options: Server, codec: str) -> None:
    """With a bound of 0, and the servers' SGD: the same bits as data parallel training."""
    ours = unclipped(options, members=3, steps=8, codec=codec)
    theirs = unclipped(EveryStep(), members=3, steps=8, codec=codec)
    assert torch.equal(ours[0].vector(), theirs[0].vector())


@pytest.mark.parametrize("mode", ["synchronous", "stale", "asynchronous"])
def test_one_member_with_server_optimizer_is_exact_sgd(mode: str) -> None:
    (run,) = unclipped(Server(mode=mode, optimizer="sgd", anchor_every=3), members=1, steps=8)
    model, stream = small_model(), batches(0)
    plain = sgd(model)
    for _ in range(8):
        plain.zero_grad()
        squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
        plain.step()
    assert torch.equal(run.vector(), torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("name", ["momentum", "nesterov"])
def test_the_servers_momentum_is_that_of_torch(name: str) -> None:
    options = Server(optimizer=name, momentum=0.8, anchor_every=3)
    (run,) = unclipped(options, members=1, steps=8)
    model, stream = small_model(), batches(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=name == "nesterov")
    for _ in range(8):
        plain.zero_grad()
        squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
        plain.step()
    theirs = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert (run.vector() - theirs).abs().max() < 1e-6


def test_delay_compensation_follows_its_formula() -> None:
    """Two members of one speed: the second push of a pair is late by one version."""
    options = Server(mode="asynchronous", optimizer="sgd", compensation=0.5, anchor_every=100)
    runs = unclipped(options, members=2, steps=3)
    models = [small_model(), small_model()]
    streams = [batches(0), batches(1)]
    read = [flat(model) for model in models]
    theta = read[0]
    for _ in range(3):
        gradients = []
        for model, stream in zip(models, streams, strict=True):
            model.zero_grad()
            squared_error(model, next(stream))[0].backward()  # type: ignore[no-untyped-call]
            gradients.append(
                torch.cat([p.grad.flatten().double() for p in model.parameters()])  # type: ignore[union-attr]
            )
        for member, g in enumerate(gradients):
            theta = theta - 0.05 * (g + 0.5 * g * g * (theta - read[member]))
            read[member] = theta
            assign(models[member], theta)
    assert (runs[0].vector().double() - theta).abs().max() < 1e-6


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


# ------------------------------------------------------------------------------ speeds


def train_at(options: Server, speeds: dict[str, float], *, steps: int) -> tuple[Any, MemoryGroups]:
    groups = MemoryGroups(len(speeds), timeout_s=PATIENCE_S)
    groups.coordinator.servers.speeds.update(speeds)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.task.last = steps
        while run.task.step < steps:
            run.train(1)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    return groups.together(body), groups


def test_a_fast_member_is_held_back_by_the_bound() -> None:
    speeds = {"w0": 1.0, "w1": 0.1}
    _, groups = train_at(Server(mode="stale", bound=2, anchor_every=100), speeds, steps=20)
    ahead, counts = 0, dict.fromkeys(speeds, 0)
    for _, member in groups.coordinator.servers.log:
        counts[member] += 1
        if counts["w1"] < 15:
            ahead = max(ahead, counts["w0"] - counts["w1"])
    assert ahead == 3  # the bound, and the clock that it has just finished


def test_backup_members_are_not_waited_for() -> None:
    """A clock takes as long as the second slowest; what the slowest brings is mostly refused."""
    speeds = {"w0": 1.0, "w1": 1.0, "w2": 0.1}
    waiting, groups = train_at(Server(anchor_every=100), speeds, steps=20)
    slow = groups.coordinator.servers.log[-1][0]
    backed, groups = train_at(Server(anchor_every=100, backups=1), speeds, steps=20)
    assert groups.coordinator.servers.log[-1][0] < 0.3 * slow
    for runs in (waiting, backed):
        assert all(torch.equal(run.vector(), runs[0].vector()) for run in runs)


@pytest.mark.parametrize("mode", ["synchronous", "stale"])
def test_death_of_an_awaited_member_frees_the_others(mode: str) -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> Run:
        run = start_run(Server(mode=mode, bound=1, anchor_every=50), group, int(group.me[1:]))
        run.train(4)
        if group.me == "w1":
            groups.kill("w1")
        run.train(6)
        run.outer.finish(run.task)
        return run

    first, dead, last = groups.run(body)
    assert isinstance(dead, Exception)
    assert isinstance(first, Run), first
    assert isinstance(last, Run), last
    assert torch.equal(first.vector(), last.vector())


@pytest.mark.parametrize(
    "options",
    [
        Server(mode="wild"),
        Server(optimizer="adamw"),
        Server(optimizer="nesterov", momentum=0.0),
        Server(mode="asynchronous", compensation=0.1),
        Server(bound=-1),
        Server(backups=-1),
        Server(mode="stale", backups=1),
        Server(staleness="inverse"),
        Server(max_staleness=2),
        Server(anchor_every=-1),
        Server(weight="size"),
        Server(staleness_power=-1.0),
    ],
)
def test_options_out_of_range_are_refused(options: Server) -> None:
    with pytest.raises(ConfigError):
        options.build()


def test_server_optimizer_refuses_rates_per_parameter() -> None:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}]
        return torch.optim.SGD(groups)

    with pytest.raises(ConfigError, match="member"):
        start_run(Server(optimizer="sgd"), MemoryGroups(1)[0], 0, optimizer=optimizer, begin=False)


@pytest.mark.parametrize(
    "preset",
    [
        "async-diloco",
        "async-look-ahead",
        "halos",
        "parameter-server",
        "stale-synchronous",
        "async-sgd",
    ],
)
def test_presets_can_be_built(preset: str) -> None:
    resolve(StrategyTable(preset=preset)).build()


@pytest.mark.parametrize("servers", [1, 3])
def test_state_of_another_number_of_servers_is_refused(servers: int) -> None:
    saved = start_run(Server(servers=servers), MemoryGroups(1)[0], 0).outer.state_dict()
    run = start_run(Server(servers=2), MemoryGroups(1)[0], 0)
    with pytest.raises(ConfigError, match=f"on {servers} servers"):
        run.outer.load_state_dict(saved)


def test_state_of_another_update_rule_is_refused_whole() -> None:
    other = start_run(Server(optimizer="sgd"), MemoryGroups(1)[0], 0, optimizer=sgd)
    other.train(3)
    options = Server(optimizer="momentum")
    run = start_run(options, MemoryGroups(1)[0], 0, optimizer=sgd)
    before = {name: value.clone() for name, value in run.outer.state_dict().items()}
    with pytest.raises(ConfigError, match="another update rule"):
        run.outer.load_state_dict(other.outer.state_dict())
    after = run.outer.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
