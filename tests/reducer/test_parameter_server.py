from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.reducer.parameter_server import Answers, ParameterServer
from atoll.reducer.worker_clocks import WorkerClocks
from atoll.wire.parameter_server_messages import Answer, Attach, Fetch, Idle, Load, Push, Setup
from tests.tiers import examples

FP32 = make_codec("fp32")
ELEMENTS = 6


def loaded(setup: Setup, members: list[str], *, theta: Tensor | None = None) -> ParameterServer:
    """Return a server that stands on anchor 1 and knows all members."""
    server = ParameterServer()
    setup = msgspec.structs.replace(setup, parameters=ELEMENTS)
    vector = torch.zeros(ELEMENTS) if theta is None else theta
    for member in members:
        for name, answer, _ in server.handle(member, Attach(1, members, want=False)):
            if answer.kind == "load":
                server.handle(name, Load(1, members, setup, ELEMENTS), FP32.encode(vector))
    assert server.anchor == 1
    return server


def push(
    server: ParameterServer, member: str, seq: int, *, x: Tensor | None = None, version: int = -1
) -> Answers:
    vector = torch.ones(ELEMENTS) if x is None else x
    version = server.version if version < 0 else version
    ask = Push(1, seq, version, "fp32", [ELEMENTS])
    return server.handle(member, ask, FP32.encode(vector))


def names(answers: Answers) -> list[str]:
    return [member for member, _, _ in answers]


def test_first_member_loads_an_empty_server() -> None:
    server, members = ParameterServer(), ["w0", "w1"]
    assert server.handle("w1", Attach(1, members)) == []
    ((name, answer, _),) = server.handle("w0", Attach(1, members))
    assert (name, answer.kind) == ("w0", "load")
    load = Load(1, members, Setup(parameters=ELEMENTS), ELEMENTS, version=7, progress=3.0)
    answers = server.handle("w0", load, FP32.encode(torch.arange(6.0)))
    assert sorted(names(answers)) == ["w0", "w1"]
    assert all(answer.version == 7 for _, answer, _ in answers)
    packet = next(packet for name, _, packet in answers if name == "w1")
    assert packet is not None
    assert torch.equal(FP32.decode(packet), torch.arange(6.0))


def test_another_member_loads_when_the_first_is_lost() -> None:
    server, members = ParameterServer(), ["w0", "w1", "w2"]
    assert server.handle("w1", Attach(1, members)) == []
    ((name, answer, _),) = server.lose("w0")
    assert (name, answer.kind) == ("w1", "load")


def test_who_does_not_stand_on_the_anchor_is_told_so() -> None:
    server = loaded(Setup(), ["w0"])
    for ask in (Attach(0), Attach(2), Fetch(0), Idle(2), Push(2, 1, 0, "fp32", [6])):
        ((_, answer, _),) = server.handle("w1", ask, FP32.encode(torch.ones(6)))
        assert answer.kind == "unknown"


def test_a_member_that_is_done_meets_the_others_when_they_come() -> None:
    """Joins are awaited for a limited time: a round must not begin before the slow are near."""
    load = Load(2, ["w1"], Setup(parameters=ELEMENTS), ELEMENTS)
    ends: list[Callable[[ParameterServer], Answers]] = [
        lambda s: s.handle("w1", Idle(1)),  # it comes to a sync point
        lambda s: s.handle("w1", Idle(1, final=True)),  # it is done, too
        lambda s: s.lose("w1"),
        lambda s: s.handle("w1", load, FP32.encode(torch.ones(ELEMENTS))),
    ]
    for end in ends:
        server = loaded(Setup(), ["w0", "w1"])
        assert server.handle("w0", Idle(1, final=True)) == []
        assert names(push(server, "w1", 1)) == ["w1"], "the slow member goes on"
        assert server.handle("w0", Idle(1, final=True)) == [], "sent again after a reconnect"
        assert "w0" in names(end(server))


def test_repeated_push_is_idempotent() -> None:
    server = loaded(Setup(), ["w0", "w1"])
    first = push(server, "w0", 1)
    push(server, "w1", 1)
    before = server.theta.clone()
    assert push(server, "w0", 1) == first
    assert torch.equal(server.theta, before)
    assert server.version == 2


def test_a_repeated_push_that_is_held_back_is_answered_once() -> None:
    server = loaded(Setup(mode="stale", bound=0), ["w0", "w1"])
    assert push(server, "w0", 1) == []
    assert push(server, "w0", 1) == []
    assert sorted(names(push(server, "w1", 1))) == ["w0", "w1"]
    assert server.version == 2


@pytest.mark.parametrize("rule", ["sgd", "momentum", "nesterov", "delayed-nesterov"])
def test_what_was_fetched_and_loaded_goes_on_bit_for_bit(rule: str) -> None:
    setup = Setup(rule=rule, rate=0.3, momentum=0.9, buffer=2, parameters=ELEMENTS)
    whole = loaded(setup, ["w0"], theta=torch.arange(6.0))
    generator = torch.Generator().manual_seed(0)
    moves = [torch.randn(6, generator=generator) for _ in range(7)]
    for number, x in enumerate(moves[:3]):
        push(whole, "w0", number, x=x)
    ((_, state, packet),) = whole.handle("w0", Fetch(1))
    halves = ParameterServer()
    halves.handle(
        "w0",
        Load(
            1,
            ["w0"],
            setup,
            ELEMENTS,
            vectors=state.vectors,
            scalars=state.scalars,
            version=state.version,
        ),
        packet,
    )
    for server in (whole, halves):
        for number, x in enumerate(moves[3:]):
            push(server, "w0", 10 + number, x=x)
    assert torch.equal(whole.theta, halves.theta)
    assert whole.version == halves.version == 7


def test_non_finite_values_are_refused_without_effect() -> None:
    for mode in ("asynchronous", "stale", "synchronous"):
        server = loaded(Setup(mode=mode), ["w0"])
        bad = torch.full((ELEMENTS,), float("nan"))
        ((_, answer, _),) = push(server, "w0", 1, x=bad)
        assert answer.kind == "refused"
        assert answer.error["kind"] == "LossNotFinite"
        assert torch.equal(server.theta, torch.zeros(ELEMENTS))
        ((_, answer, _),) = push(server, "w0", 2)
        assert answer.accepted


@pytest.mark.parametrize(
    ("ask", "elements"),
    [
        (Push(1, 1, 0, "fp32", [6]), 5),
        (Push(1, 1, 0, "fp32", [6], weight=float("nan")), 6),
        (Push(1, 1, 0, "fp32", [6], rate=float("inf")), 6),
        (Push(1, 1, 0, "fp32", [6], steps=-1), 6),
        (Load(2, ["w0"], Setup(rule="magic", parameters=6), 6), 6),
        (Load(2, ["w0"], Setup(parameters=7), 6), 6),
        (Load(2, ["w0"], Setup(parameters=6), 6, vectors=["velocity"]), 12),
    ],
)
def test_what_cannot_be_is_refused(ask: Push | Load, elements: int) -> None:
    server = loaded(Setup(), ["w0"])
    ((_, answer, _),) = server.handle("w0", ask, FP32.encode(torch.ones(elements)))
    assert answer.kind == "refused"
    assert server.anchor == 1


def test_buffers_move_by_a_members_share() -> None:
    server = loaded(Setup(), ["w0", "w1"])
    server.setup = msgspec.structs.replace(server.setup, parameters=4)
    push(server, "w0", 1)
    assert server.theta.tolist() == [-1.0] * 4 + [-0.5] * 2


@pytest.mark.parametrize(
    ("setup", "move"),
    [
        (Setup(staleness="constant"), 1.0),
        (Setup(staleness="inverse"), 1 / 3),
        (Setup(staleness="power", power=0.5), 0.5),
        (Setup(limit=3), 1.0),
        (Setup(limit=2), 0.0),
    ],
)
def test_what_a_push_counts_that_is_three_versions_late(setup: Setup, move: float) -> None:
    server = loaded(setup, ["w0", "w1"])
    for seq in range(3):
        push(server, "w0", seq)
    before = server.theta.clone()
    ((_, answer, _),) = push(server, "w1", 0, version=0)
    assert answer.staleness == 3
    assert answer.accepted == (move > 0)
    assert (before - server.theta)[0].item() == pytest.approx(move)


def test_synchronous_clock_takes_the_first_pushes_only() -> None:
    server = loaded(Setup(mode="synchronous", backups=1), ["w0", "w1", "w2"])
    assert push(server, "w2", 1, x=torch.full((6,), 4.0)) == []
    answers = push(server, "w0", 1, x=torch.full((6,), 2.0))
    assert names(answers) == ["w0", "w2"]
    assert server.theta[0] == -3.0
    ((name, late, _),) = push(server, "w1", 1, version=0)
    assert (name, late.accepted, late.version) == ("w1", False, 1)
    assert server.theta[0] == -3.0


# ------------------------------------------------------------------- random schedules

MEMBERS = ["w0", "w1", "w2", "w3"]


class Schedule:
    """Members that ask in any order, die, come back and rest, against one server."""

    def __init__(self, mode: str, bound: int) -> None:
        self.server = loaded(Setup(mode=mode, bound=bound), MEMBERS)
        self.seq = dict.fromkeys(MEMBERS, 0)
        self.versions = dict.fromkeys(MEMBERS, 0)
        self.blocked: set[str] = set()
        self.clocks = dict.fromkeys(MEMBERS, 0)
        self.alive = set(MEMBERS)
        self.resting: set[str] = set()

    def take(self, answers: Answers) -> None:
        for member, answer, _ in answers:
            assert isinstance(answer, Answer)
            self.blocked.discard(member)
            if answer.kind == "theta":
                self.clocks[member], self.versions[member] = answer.clock, answer.version

    def step(self, member: str, deed: str) -> None:
        free = member in self.alive and member not in self.blocked and member not in self.resting
        if deed == "push" and free:
            self.seq[member] += 1
            self.blocked.add(member)
            self.take(push(self.server, member, self.seq[member], version=self.versions[member]))
        elif deed == "die" and member in self.alive and len(self.alive) > 1:
            self.alive.discard(member)
            self.blocked.discard(member)
            self.take(self.server.lose(member))
        elif deed == "return" and member not in self.alive:
            self.alive.add(member)
            self.resting.discard(member)
            self.take(self.server.handle(member, Attach(1)))
        elif deed == "idle" and free:
            self.resting.add(member)
            self.take(self.server.handle(member, Idle(1)))

    def finished(self) -> list[int]:
        """Return the clocks of members that take part, as the server counts them."""
        workers = self.server.clocks.workers
        return [workers[m].clock for m in self.alive - self.resting]


deeds = st.lists(
    st.tuples(st.sampled_from(MEMBERS), st.sampled_from(["push"] * 6 + ["die", "return", "idle"])),
    max_size=120,
)


@settings(max_examples=examples(60), deadline=None)
@given(bound=st.integers(0, 4), schedule=deeds)
@example(bound=0, schedule=[("w0", "push"), ("w0", "die"), ("w0", "return"), ("w0", "push")])
def test_nobody_is_further_ahead_than_the_bound_and_a_clock(
    bound: int, schedule: list[tuple[str, str]]
) -> None:
    run = Schedule("stale", bound)
    for member, deed in schedule:
        run.step(member, deed)
        clocks = run.finished()
        if clocks:
            assert max(clocks) - min(clocks) <= bound + 1


@settings(max_examples=examples(60), deadline=None)
@given(
    mode=st.sampled_from(["stale", "synchronous", "asynchronous"]),
    bound=st.integers(0, 3),
    schedule=deeds,
)
def test_somebody_can_always_go_on(mode: str, bound: int, schedule: list[tuple[str, str]]) -> None:
    """The dead and the resting never freeze the others."""
    run = Schedule(mode, bound)
    for member, deed in schedule:
        run.step(member, deed)
        present = run.alive - run.resting
        assert not present or present - run.blocked


@settings(max_examples=examples(60), deadline=None)
@given(schedule=deeds)
def test_zero_staleness_keeps_clocks_within_one(
    schedule: list[tuple[str, str]],
) -> None:
    run = Schedule("synchronous", 0)
    for member, deed in schedule:
        if deed == "push":
            run.step(member, deed)
            clocks = run.finished()
            assert max(clocks) - min(clocks) <= 1


@pytest.mark.parametrize("busy_s", [5e-324, 1e-300, 1e300, float("inf"), float("nan"), -1.0])
def test_an_absurd_speed_changes_no_plan(busy_s: float) -> None:
    clocks = WorkerClocks(["w0", "w1"])
    clocks.measure("w0", 1, busy_s)
    clocks.measure("w1", 1, 2.0)
    assert clocks.plan("w1", 10, dynamic=True) == (10, 10)
    assert clocks.plan("w0", 10, dynamic=True) == (10, 10)


def test_another_codec_than_the_others_refuses_one_push_only() -> None:
    server = loaded(Setup(mode="synchronous"), ["w0", "w1", "w2"])
    fp16 = make_codec("fp16")
    odd = Push(1, 0, server.version, "fp16", [ELEMENTS])
    assert server.handle("w0", odd, fp16.encode(torch.ones(ELEMENTS))) == []
    assert push(server, "w1", 0) == []
    answers = {member: answer for member, answer, _ in push(server, "w2", 0)}
    assert answers["w0"].kind == "refused"
    assert "does not fit the others'" in answers["w0"].error["what"]
    assert [answers[m].version for m in ("w1", "w2")] == [1, 1]
