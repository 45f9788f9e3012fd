"""Rounds that run beside training: lost members, newcomers, leaving, data and time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint.format.part import Part, part_blocks, read_part
from atoll.clock import RealClock
from atoll.errors import GroupLeft, LeftBehind
from atoll.group.base import Group, Work
from atoll.group.in_process.groups import MemoryGroup, MemoryGroups
from atoll.methods.overlapped import Eager, Streaming
from atoll.strategies.base import SyncResult
from atoll.train.results.metrics import Totals
from atoll.train.state.committed import CommittedState, adopt
from tests.contracts.strategy_suite import Run, small_model, start_run
from tests.patience import PATIENCE_S

STEPS = 18
OUTERS = [
    pytest.param(Streaming(every=6, fragments=2, delay=2), 5, id="streaming"),
    pytest.param(Eager(every=3), 6, id="eager"),
]
"""Options, and a step right after a result was taken."""


def wait_for(ready: Callable[[], bool], what: str, *, timeout_s: float = PATIENCE_S) -> None:
    deadline, pause = RealClock().monotonic() + timeout_s, threading.Event()
    while not ready():
        assert RealClock().monotonic() < deadline, what
        pause.wait(0.002)


def copied(part: Part, folder: Path) -> Part:
    """Return the part as it arrives elsewhere."""
    path = folder / f"{part.name}-{threading.get_ident()}"
    blocks = part_blocks(part.tensors, part.metadata)
    path.write_bytes(b"".join(bytes(block) for block in blocks))
    return read_part(path)


def take_over(run: Run, group: MemoryGroup, others: Mapping[str, Run], folder: Path) -> None:
    """Do what a recovery does: take the committed state of a member that stands on it."""
    sources = group.recover()
    donor = others[sources.peers[0].member]
    state = CommittedState(donor.task, donor.outer)
    wait_for(lambda: state.round == sources.round, "the donor does not come to the round")
    with donor.task.state_lock.still(timeout_s=PATIENCE_S):
        shared, inner = (copied(part, folder) for part in state.parts())
    adopt(run.task, run.outer, shared=shared, inner=inner)
    group.standing(run.task.round, base=run.outer.committed(run.task).base)


def end(run: Run) -> Run:
    run.train(STEPS - run.task.step)
    run.note(run.outer.finish(run.task))
    return run


def assert_one_model(runs: list[Run]) -> None:
    first, *rest = runs
    for other in rest:
        assert torch.equal(other.vector(), first.vector())
        assert other.results[-1].digest == first.results[-1].digest
        assert other.task.round == first.task.round
        assert other.outer.digest(other.task) == first.outer.digest(first.task)


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_lagging_member_learns_it_with_the_result(options: Any, after: int, tmp_path: Path) -> None:
    groups, runs, back = MemoryGroups(3), {}, threading.Event()
    ready = threading.Barrier(3)

    def body(group: Group) -> Run:
        run = runs[group.me] = start_run(options, group, int(group.me[1:]))
        run.train(after)
        ready.wait(PATIENCE_S)
        if group.me != "w1":
            standing = groups.coordinator.machine.members.states
            wait_for(lambda: standing["w1"] == "away", "w1 is not gone")
            run.train(3)  # the next round is taken
            assert back.wait(PATIENCE_S)
            return end(run)
        groups.lose("w1")
        before = run.task.round
        wait_for(lambda: runs["w0"].task.round > before, "the others do not go on")
        wait_for(lambda: runs["w2"].task.round > before, "the others do not go on")
        with pytest.raises(LeftBehind):
            run.train(3)
        assert isinstance(group, MemoryGroup)
        take_over(run, group, runs, tmp_path)
        assert run.task.step == runs["w0"].task.step
        back.set()
        return end(run)

    assert_one_model(groups.together(body))


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_newcomer_starts_from_the_common_parameters(
    options: Any, after: int, tmp_path: Path
) -> None:
    groups, runs = MemoryGroups(2), {}
    arrived, ready = threading.Event(), threading.Barrier(3)

    def body(group: Group) -> Run:
        run = runs[group.me] = start_run(options, group, int(group.me[1:]))
        run.train(after)
        ready.wait(PATIENCE_S)
        assert arrived.wait(PATIENCE_S)
        return end(run)

    def newcomer() -> Run:
        ready.wait(PATIENCE_S)
        group = groups.add()
        try:
            model = small_model(seed=99)
            run = start_run(options, group, 2, model=model, begin=False)
            take_over(run, group, runs, tmp_path)
            with runs["w0"].outer.evaluating(runs["w0"].task):
                assert torch.equal(run.vector(), runs["w0"].vector())
        finally:
            arrived.set()
        return end(run)

    late = Work.start(newcomer, name="newcomer")
    assert_one_model([*groups.together(body), late.wait(PATIENCE_S)])


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_waiting_member_donates_its_committed_state(options: Any, after: int) -> None:
    groups = MemoryGroups(2)
    flying, looked = threading.Event(), threading.Event()
    found: list[tuple[int, str]] = []

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(after)
        if group.me == "w1":
            assert looked.wait(PATIENCE_S)
            return end(run)
        state = CommittedState(run.task, run.outer)
        before = (state.round, state.base)
        run.train(2 if isinstance(options, Streaming) else 1)
        flying.set()
        with run.task.state_lock.still(timeout_s=PATIENCE_S):
            shared, _ = state.parts()
        assert (state.round, state.base) == before
        assert not any("pending" in name for name in shared.tensors)
        found.append(before)
        looked.set()
        return end(run)

    assert_one_model(groups.together(body))
    assert flying.is_set()
    assert found


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_leaving_ends_the_wait_for_a_round_under_way(options: Any, after: int) -> None:
    groups, left = MemoryGroups(2), threading.Event()

    def body(group: Group) -> Run:
        run = start_run(options, group, int(group.me[1:]))
        run.train(after)
        if group.me == "w0":
            assert left.wait(PATIENCE_S)
            return end(run)
        run.train(1 + isinstance(options, Streaming))  # the round is under way, w0 is not there
        group.leave("asked to", timeout_s=0.2)
        left.set()
        with pytest.raises(GroupLeft):
            run.train(3)
        return run

    stayed, gone = groups.together(body)
    assert stayed.task.step == STEPS
    assert gone.task.step < STEPS
    assert stayed.results[-1].contributors == ("w0",)


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_a_saved_state_waits_for_the_result_to_come_and_holds_it(options: Any, after: int) -> None:
    def body(group: Group) -> dict[str, torch.Tensor]:
        run = start_run(options, group, int(group.me[1:]))
        run.train(after + 1 + isinstance(options, Streaming))
        state = run.outer.state_dict()
        end(run)
        return state

    for state in MemoryGroups(2).together(body):
        assert {"own.pending.facts", "own.pending.0", "own.pending.contributors"} <= state.keys()


class Place:
    """Data that knows where it stands and where it was sent."""

    def __init__(self, slot: int) -> None:
        self.slot, self.offset = slot, 0
        self.moves: list[int] = []

    def place(self) -> tuple[int, dict[str, int]]:
        return self.slot, {"slot": self.slot, "data_pass": 0, "offset": self.offset}

    def place_after(self, steps: int) -> None:
        return None

    def move(self, slot: int, cursor: Mapping[str, int]) -> None:
        self.slot, self.offset = slot, dict(cursor).get("offset", 0)
        self.moves.append(slot)


@pytest.mark.parametrize(("options", "after"), OUTERS)
def test_a_verdict_does_not_rewind_the_data_by_the_steps_since(options: Any, after: int) -> None:
    def body(group: Group) -> Place:
        run = start_run(options, group, int(group.me[1:]))
        run.task.stretch = place = Place(int(group.me[1:]))
        for _ in range(STEPS):
            place.offset += 1
            run.train(1)
        run.outer.finish(run.task)
        return place

    for slot, place in enumerate(MemoryGroups(2).together(body)):
        assert (place.slot, place.offset) == (slot, STEPS)


def test_only_what_training_waited_for_counts_as_time_of_a_round() -> None:
    seconds = {"prepare": 0.5, "join": 0.0, "reduce": 0.25, "commit": 0.0, "apply": 0.25}
    sync = SyncResult(0, ("w0",), 1.0, seconds | {"hidden": 60.0})
    totals = Totals()
    totals.count(3.0, sync)
    assert (totals.sync_s, totals.compute_s, totals.wall_s) == (1.0, 2.0, 3.0)
