"""Parameter servers on real processes: a real hub, the relay, a reducer that is a process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import WorkerEnvironment, child_environment
from atoll.group import parameter_server_client
from atoll.group.base import Group
from atoll.group.routes import relay
from atoll.ids import session_id
from atoll.methods.every_step import EveryStep
from atoll.methods.parameter_server import Asynchronous, Hierarchical, Server
from atoll.rounds import timing
from tests.contracts.group_suite import together
from tests.contracts.strategy_suite import Run, sgd, start_run, train_together
from tests.group.hub_world import HubWorld, NodeInName
from tests.patience import PATIENCE_S
from tests.strategies.on_routes import wide_model

pytestmark = pytest.mark.e2e

STEPS = 6


class ProcessWorld(HubWorld):
    """The reducer is `python -m atoll.reducer`, and can be killed."""

    process: subprocess.Popen[bytes] | None = None

    def start_reducer(self) -> None:
        """Start it, and another one if the hub asks for it because this one takes too long."""
        token, deadline = "", time.monotonic() + PATIENCE_S
        while not token or not self.is_here():
            assert time.monotonic() < deadline, "the reducer did not connect"
            if token != self.tokens["reducer"]:
                token = self.tokens["reducer"]
                self._start_process()
            self.node.take_commands()
            self.tokens = self.node.tokens[self.job]

    def is_here(self) -> bool:
        hub = self.hub.hub
        return hub is not None and hub.sessions.get(session_id(self.job, "reducer")) is not None

    def _start_process(self) -> None:
        self._end_process()
        worker = WorkerEnvironment(
            hub=self.hub.url, token=self.tokens["reducer"], job=self.job, member="reducer",
            directory=Path(), spec=Path(),
        )  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atoll.reducer"], env=child_environment(worker, threads=1)
        )

    def __init__(self, node: NodeInName, n: int, **options: Any) -> None:
        self.node = node
        super().__init__(node, n, **options)

    def kill_reducer(self) -> None:
        """Kill it, and start another when the hub asks for it, as a node does."""
        token = self.tokens["reducer"]
        self._end_process()
        deadline = time.monotonic() + PATIENCE_S
        while self.node.tokens[self.job]["reducer"] == token and time.monotonic() < deadline:
            self.node.take_commands()
        self.tokens = self.node.tokens[self.job]
        self.start_reducer()

    def close(self) -> None:
        super().close()
        self._end_process()

    def _end_process(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=PATIENCE_S)


@pytest.fixture
def world(node: NodeInName) -> Iterator[Callable[..., HubWorld]]:
    worlds: list[HubWorld] = []

    def make(n: int, kind: type[HubWorld] = HubWorld) -> HubWorld:
        worlds.append(kind(node, n, route="relay"))
        return worlds[-1]

    yield make
    for each in worlds:
        each.close()


def trained(options: Any, *, steps: int = STEPS, **settings: Any) -> Callable[[Group], Run]:
    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]), **settings)
        run.train(steps)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    return body


def assert_equal_models(runs: list[Any]) -> None:
    for run in runs:
        assert isinstance(run, Run), run
        assert torch.equal(run.vector(), runs[0].vector())
        assert run.results[-1].digest == runs[0].results[-1].digest


def test_synchronous_servers_equal_data_parallel_bits(
    world: Callable[..., HubWorld],
) -> None:
    options = Server(optimizer="sgd", anchor_every=4)
    runs = together(world(3), trained(options, optimizer=sgd, clip=0.0))
    expected = train_together(EveryStep(), members=3, steps=STEPS, optimizer=sgd, clip=0.0)
    assert_equal_models(runs)
    assert torch.equal(runs[0].vector(), expected[0].vector())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Asynchronous(every=2, anchor_every=4), id="asynchronous"),
        pytest.param(Asynchronous(every=2, anchor_every=4, look_ahead=1.0), id="look-ahead"),
        pytest.param(Hierarchical(every=2, anchor_every=4, merge_every=2), id="halos"),
        pytest.param(Server(mode="stale", bound=1, anchor_every=4), id="stale"),
        pytest.param(Server(mode="asynchronous", anchor_every=4), id="async-sgd"),
    ],
)
@pytest.mark.every(3)
def test_asynchronous_members_end_with_one_model(
    world: Callable[..., HubWorld], options: Any
) -> None:
    runs = together(world(3), trained(options, codec="int8"))
    assert_equal_models(runs)
    assert (runs[0].vector() - start_vector()).norm() > 0.01


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Asynchronous(every=2, anchor_every=50), id="asynchronous"),
        pytest.param(Hierarchical(every=2, anchor_every=50, merge_every=2), id="halos"),
        pytest.param(Server(mode="asynchronous", anchor_every=50), id="async-sgd"),
    ],
)
@pytest.mark.every(2)
def test_the_slow_member_does_its_whole_loop(
    world: Callable[..., HubWorld], options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast one is done long before; the hub would go on without the slow one by then."""
    monkeypatch.setattr(timing, "MIN_GRACE_S", 0.1)
    done, ended = threading.Event(), threading.Event()

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(STEPS)
        if group.me == "w1":
            assert done.wait(PATIENCE_S)
            assert not ended.wait(2.0), "the fast member ended without the slow one"
            monkeypatch.setattr(timing, "MIN_GRACE_S", PATIENCE_S)  # both come to the last round
            run.train(3 * STEPS)
        done.set()
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        ended.set()
        return run

    fast, slow = together(world(2), body)
    assert [len(fast.losses), len(slow.losses)] == [STEPS, 4 * STEPS]
    assert_equal_models([fast, slow])
    assert fast.results[-1].contributors == ("w0", "w1")


def start_vector() -> torch.Tensor:
    (run,) = train_together(Server(), members=1, steps=0)
    return run.vector()


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.every(2)
def test_bytes_on_the_wire_equal_the_formula_within_two_per_cent(
    world: Callable[..., HubWorld], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of members that push equally often; heads of frames and looks are what is left."""
    # A server that a busy machine holds up is not asked for an answer again: it would send two.
    for module, name in (
        (parameter_server_client, "STALL_S"), (parameter_server_client, "MAX_STALL_S"),
        (parameter_server_client, "SILENT_S"), (relay, "STALL_S"), (relay, "MAX_STALL_S"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, PATIENCE_S)
    options = Server(anchor_every=4, reply="bf16")
    place = world(2)
    runs = together(place, trained(options, codec=codec, model=wide_model()))
    for rank, (run, group) in enumerate(zip(runs, place.groups, strict=True)):
        expected = run.outer.traffic(32_002, 2, steps=STEPS, rank=rank)
        assert group.sent_bytes == pytest.approx(expected.relay_sent_bytes, rel=0.02)
        assert group.received_bytes == pytest.approx(expected.relay_received_bytes, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Asynchronous(every=2, anchor_every=50), id="asynchronous"),
        pytest.param(Hierarchical(every=2, anchor_every=50, merge_every=2), id="halos"),
        pytest.param(Server(mode="stale", bound=1, anchor_every=50), id="stale"),
        pytest.param(Server(anchor_every=50), id="synchronous"),
    ],
)
@pytest.mark.every(3)
def test_survivors_of_a_lost_member_go_on_and_end_with_one_model(
    world: Callable[..., HubWorld], options: Any
) -> None:
    place = world(3)

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(3)
        if group.me == "w1":
            place.die(group)
            return run
        run.train(STEPS)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run

    first, _, last = place.run(body)
    assert_equal_models([first, last])


def test_a_killed_server_is_loaded_with_what_its_members_have(
    world: Callable[..., ProcessWorld],
) -> None:
    """The process is killed in the middle of a run, with no anchor since the start."""
    options = Asynchronous(every=2, anchor_every=50)
    place = world(2, ProcessWorld)
    half_way, killed = threading.Barrier(2), threading.Event()

    def body(group: Group) -> tuple[Run, torch.Tensor]:
        run = start_run(options, group, int(group.me[1:]))
        run.train(6)
        before = run.vector()
        half_way.wait(PATIENCE_S)
        if group.me == "w0":
            place.kill_reducer()
            killed.set()
        assert killed.wait(PATIENCE_S)
        run.train(6)
        while (result := run.outer.finish(run.task)) is not None:
            run.note(result)
        return run, before

    results = [each for each in place.run(body)]
    assert all(isinstance(each, tuple) for each in results), results
    runs = [each[0] for each in results if isinstance(each, tuple)]
    assert_equal_models(runs)
    assert len(runs[0].results) == 2  # the anchor that loaded the new process, and the last one
    learned = [each[1] for each in results if isinstance(each, tuple)]
    first = (runs[0].rounds[0] - start_vector()).norm()
    assert first > 0.5 * min((v - start_vector()).norm() for v in learned)
