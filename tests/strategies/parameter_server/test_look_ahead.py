"""Look-ahead: members train from where momentum will have moved the server's vector."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.methods.method import Method
from atoll.methods.parameter_server import Asynchronous, Server
from atoll.reducer.parameter_server import ParameterServer
from atoll.reducer.update_rules import make_rule
from atoll.wire.parameter_server_messages import Attach, Load, Push, Setup
from tests.contracts.strategy_suite import (
    Reference,
    Run,
    StrategySuite,
    adamw,
    sgd,
    start_run,
    train_together,
)
from tests.patience import PATIENCE_S
from tests.reference.asynchronous import DelayedServer

EVERY, ANCHOR, SHARE = 3, 6, 0.75
ELEMENTS = 40


class TestLookAhead(StrategySuite):
    """Members are equally fast, so between two pushes of one there is one of every other."""

    name = "asynchronous_look_ahead"
    options = Asynchronous(every=EVERY, anchor_every=ANCHOR, outer_momentum=0.9, look_ahead=SHARE)
    codec = "int8"

    def same_as_plain(self) -> Any:
        return Asynchronous(every=EVERY, anchor_every=ANCHOR, outer_optimizer="sgd", outer_lr=1.0)

    def reference(self, members: int, steps: int) -> Tensor:
        return formula(list(range(members)), steps)

    def test_the_order_of_members_only_reassociates_sums(self) -> None:
        """The order of arrival counts, so the result is the formula's in the other order."""
        runs = train_together(self.options, members=2, steps=6, slots=(1, 0))
        assert (runs[0].vector().double() - formula([1, 0], 6)).abs().max() < self.tolerance


def formula(order: list[int], steps: int) -> Tensor:
    """Return the vector after members have pushed in this order, every so many steps."""
    those = Reference.make(len(order), adamw)
    starts = those.vectors()
    server = DelayedServer(starts[0], len(order), 0.7, 0.9)
    for step in range(1, steps + 1):
        for member in order:
            those.gradient_step(member)
        if step % EVERY and step != steps:
            continue
        found = those.vectors()
        for member in order:
            server.arrive(starts[member] - found[member])
            starts[member] = server.ahead(len(order) - 1, SHARE)
            Reference([those.models[member]], [], []).assign(starts[member])
        if step % ANCHOR == 0:
            starts = [server.theta] * len(order)
            those.assign(server.theta)
    return server.theta


# ------------------------------------------------------------------------------ identities


@pytest.mark.parametrize(
    ("members", "look_ahead"),
    [pytest.param(1, 1.0, id="no delay"), pytest.param(3, 0.0, id="coefficient of 0")],
)
def test_without_delay_or_coefficient_it_is_the_base(members: int, look_ahead: float) -> None:
    base = Asynchronous(every=EVERY, anchor_every=ANCHOR)
    ahead = Asynchronous(every=EVERY, anchor_every=ANCHOR, look_ahead=look_ahead)
    ours, theirs = (train_together(o, members=members, steps=10) for o in (ahead, base))
    assert torch.equal(ours[0].vector(), theirs[0].vector())
    assert ours[0].losses == theirs[0].losses


def test_with_delay_and_coefficient_it_is_not_the_base() -> None:
    base = Asynchronous(every=2, anchor_every=20)
    ahead = Asynchronous(every=2, anchor_every=20, look_ahead=1.0)
    ours, theirs = (train_together(o, members=3, steps=12) for o in (ahead, base))
    assert (ours[0].vector() - theirs[0].vector()).abs().max() > 1e-3


def test_momentum_one_push_ahead_is_nesterov() -> None:
    """Nesterov's iterate, as torch writes it, is the point ahead that gradients are taken at."""
    setup = Setup(rule="momentum", momentum=0.9, parameters=ELEMENTS)
    plain, nesterov = make_rule(setup), make_rule(Setup("nesterov", 1.0, 0.9, parameters=ELEMENTS))
    theta, other = torch.zeros(ELEMENTS), torch.zeros(ELEMENTS)
    for push in pushes(8):
        plain.apply(theta, push.clone(), lr=0.5)
        nesterov.apply(other, push.clone(), lr=0.5)
        move = plain.momentum_move(1, lr=0.5)
        assert move is not None
        assert (theta - move - other).abs().max() < 1e-5


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
@pytest.mark.parametrize(
    "setup",
    [
        Setup("sgd", parameters=ELEMENTS),
        Setup("momentum", momentum=0.8, parameters=ELEMENTS),
        Setup("nesterov", momentum=0.8, parameters=ELEMENTS),
        Setup("delayed-nesterov", momentum=0.8, buffer=4, parameters=ELEMENTS),
        Setup("delayed-nesterov", momentum=0.8, buffer=4, activation=0.1, parameters=ELEMENTS),
    ],
    ids=lambda setup: (
        f"{setup.rule} {setup.activation}" if isinstance(setup, Setup) else str(setup)
    ),
)
def test_a_move_is_what_pushes_of_zeros_do(setup: Setup, ahead: int) -> None:
    rule, theta = make_rule(setup), torch.zeros(ELEMENTS)
    for push in pushes(6):
        rule.apply(theta, push, lr=0.5)
    move, before = rule.momentum_move(ahead, lr=0.5), theta.clone()
    for _ in range(ahead):
        rule.apply(theta, torch.zeros(ELEMENTS), lr=0.5)
    moved = torch.zeros(ELEMENTS) if move is None else move
    assert (before - theta - moved).abs().max() < 1e-5
    assert move is None or bool(move.any())


def pushes(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ELEMENTS, generator=generator) for _ in range(count)]


def test_a_member_is_ahead_by_as_much_as_its_pushes_are_late() -> None:
    server, fp32 = ParameterServer(), make_codec("fp32")
    setup = Setup("momentum", momentum=0.8, look_ahead=0.5, parameters=ELEMENTS)
    for member in ("w0", "w1"):
        server.handle(member, Attach(1, ["w0", "w1"], want=False))
    server.handle("w0", Load(1, ["w0", "w1"], setup, ELEMENTS), fp32.encode(torch.zeros(ELEMENTS)))
    pulled, found = {"w0": 0, "w1": 0}, []
    for seq, member in enumerate(("w0", "w1", "w0", "w0", "w0", "w1", "w0")):
        ask = Push(1, seq, pulled[member], "fp32", [ELEMENTS])
        ((_, answer, packet),) = server.handle(member, ask, fp32.encode(torch.ones(ELEMENTS)))
        pulled[member] = answer.version
        assert packet is not None
        move = 2.0 * (server.theta - fp32.decode(packet))[0]
        velocity = 1.0 / (1 - 0.8) * (1 - 0.8 ** (seq + 1))
        found.append(round(float(move) / velocity, 3))
    # The first push of each: as late as there are others. Then what it was.
    expected = [1, 1, 1, 0, 0, 3, 1]
    assert found == [round(sum(0.8**k for k in range(1, n + 1)), 3) for n in expected]


# ------------------------------------------------------------------------------ recovery


def test_a_sync_point_has_the_vector_itself_not_the_one_ahead() -> None:
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)

    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        options = Asynchronous(every=2, anchor_every=100, look_ahead=1.0)
        run = start_run(options, group, int(group.me[1:]))
        run.train(5)
        pulled = run.outer.state_dict()["own.pulled"].clone()
        held = groups.coordinator.servers.server().theta.clone()
        run.train(1)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return pulled, held, run.vector()

    first, second = groups.together(body)
    assert (first[0] - first[1]).abs().max() > 1e-4
    assert torch.equal(first[2], second[2])
    assert torch.equal(first[2], groups.coordinator.servers.server().theta)


def test_a_restarted_server_is_loaded_and_looks_ahead_again() -> None:
    groups = MemoryGroups(3, timeout_s=PATIENCE_S)

    def body(group: Group) -> Run:
        options = Asynchronous(every=2, anchor_every=100, look_ahead=1.0)
        run = start_run(options, group, int(group.me[1:]))
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
    assert groups.coordinator.servers.server().setup.look_ahead == 1.0


@pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
def test_per_step_servers_look_ahead_at_the_members_rate(optimizer: str) -> None:
    """The server multiplies by the rate of the last push, which the member's schedule set."""
    groups = MemoryGroups(2, timeout_s=PATIENCE_S)
    options = Server(mode="asynchronous", optimizer=optimizer, look_ahead=1.0, anchor_every=50)

    def body(group: Group) -> Tensor:
        run = start_run(options, group, int(group.me[1:]), optimizer=sgd)
        run.train(8)
        pulled = run.vector()
        while run.outer.finish(run.task) is not None:
            pass
        return pulled - run.vector()

    moved = groups.together(body)
    assert all(0.001 < float(each.norm()) < 1.0 for each in moved)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Asynchronous(look_ahead=-0.5), "momentum"),
        (Asynchronous(look_ahead=1.0, outer_optimizer="sgd", outer_momentum=0.0), "momentum"),
        (Server(look_ahead=1.0, mode="asynchronous"), "momentum"),
        (Server(look_ahead=1.0, optimizer="momentum"), "no late pushes"),
        (Server(look_ahead=1.0, mode="stale", bound=0, optimizer="momentum"), "no late pushes"),
        (
            Server(look_ahead=1.0, mode="stale", optimizer="momentum", compensation=0.1),
            "the same delay",
        ),
    ],
)
def test_what_cannot_be_looked_ahead_is_refused(options: Method, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options.build()
