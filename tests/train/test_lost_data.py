"""Every sample of a pass is in committed work once, whatever becomes of a member.

Samples of steps that were lost with a process are given again; no others are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.checkpoint import DirectoryStore, Saved, SavePoint
from atoll.checkpoint.format.part import Part
from atoll.config import CheckpointTable
from atoll.errors import DataError, PeerLost
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.recovery import Recovered
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.state.recovery_client import RecoveryClient
from tests.contracts.strategy_suite import adamw, small_model
from tests.patience import PATIENCE_S

SAMPLES, BATCH, EPOCHS = 58, 2, 2


@dataclass
class World:
    """Members on threads, with what each process read and what was lost with it."""

    folder: Path
    outer: Any
    groups: MemoryGroups
    shard: Callable[[Run], Any]
    read: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    resume_round: int = -1
    stop_at: int = -1
    """Round at which the job is asked to stop."""
    back: threading.Event = field(default_factory=threading.Event)
    """A member has recovered, and the group waits for it."""
    _states: dict[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> DirectoryStore:
        """The job's checkpoints."""
        return DirectoryStore(self.folder, job="j")

    def again(self) -> World:
        """Return the same job, resumed from its newest checkpoint."""
        round_ = self.store.latest()
        groups = MemoryGroups(len(self.groups), timeout_s=PATIENCE_S, start_round=round_)
        return replace(self, groups=groups, resume_round=round_, stop_at=-1, _states={})

    def enter(self, group: Group, *, late: bool) -> Run:
        """Return a run that can recover from the other members, or from a checkpoint."""
        slot = int(group.me[1:])
        run = Run(group, Membership(self.folder, slot=slot, num_slots=len(self.groups)))
        server = SimpleNamespace(
            offer=lambda state, *, still: self._states.update({group.me: (state, still)})
        )

        def fetch(*, ready: bool, distrusted: Any = (), older: Any = None) -> Recovered:
            answer = group.recover(list(distrusted), ready=ready)
            state, still = self._states[answer.peers[0].member]
            with still(timeout_s=PATIENCE_S):
                shared, inner = (
                    Part(part.name, {k: v.clone() for k, v in part.tensors.items()}, part.metadata)
                    for part in state.parts()
                )
                return Recovered(state.round, state.base, shared, inner, ["w0"], 0.0, 0, answer)

        standing = group.standing

        def stands(round_: int, **about: Any) -> None:
            standing(round_, **about)
            self.back.set()

        group.standing = stands  # type: ignore[method-assign]
        client = RecoveryClient(group, fetch=fetch, server=server, announce=lambda _: None)
        run._enrolled = SimpleNamespace(  # type: ignore[assignment]
            late=late, replaced=False, recovery=client, store=self._reading, saver=self._saver,
            connection=SimpleNamespace(
                registered=SimpleNamespace(resume_round=self.resume_round, lease=None)
            ),
        )  # fmt: skip
        run._saving = CheckpointTable(every=1)
        return run

    def _reading(self) -> Any:
        store: Any = self.store
        store.close = lambda: None
        return store

    def _saver(self) -> Any:
        def save(point: SavePoint, parts: Any, *, final: bool) -> Saved:
            self.store.put(point, parts)
            return Saved(0, 0.0)

        return SimpleNamespace(save=save, close=lambda *, timeout_s: None)

    def train(self, group: Group, *, late: bool = False, epochs: int = EPOCHS) -> None:
        """Be one process: a plain loop over epochs."""
        run, since, wasted = self.enter(group, late=late), Counter[int](), 0.0
        try:
            with run:
                model = small_model()
                optimizer = run.wrap(model, adamw(model), outer=self.outer, codec="fp32")
                share = self.shard(run)
                for _ in range(epochs):
                    for (rows,) in share:
                        numbers = rows[:, 0].int().tolist()
                        self.read.update(numbers)
                        since.update(numbers)
                        round_ = run._task.round if run._task else 0
                        optimizer.zero_grad()
                        model(rows / 100).square().mean().backward()
                        optimizer.step()
                        if run._task is not None and run._task.round == self.stop_at:
                            self.groups.stop()
                        if run._meter.totals.wasted_steps > wasted:  # left behind
                            self.lost.update(since)
                            wasted = run._meter.totals.wasted_steps
                            since.clear()
                        if run._task is not None and run._task.round > round_:
                            since.clear()
        except PeerLost:
            self.lost.update(since)
            raise


def loader() -> DataLoader[Any]:
    rows = torch.arange(SAMPLES, dtype=torch.float32)[:, None].expand(-1, 5)
    return DataLoader(TensorDataset(rows), batch_size=BATCH, shuffle=True)


def world(folder: Path, outer: Any, members: int = 2) -> World:
    groups = MemoryGroups(members, timeout_s=PATIENCE_S)
    return World(folder, outer, groups, lambda run: run.shard(loader()))


def assert_each_once(world: World, epochs: int = EPOCHS) -> None:
    committed = world.read - world.lost
    assert committed == Counter(dict.fromkeys(range(SAMPLES), epochs))


OUTERS = [
    pytest.param(atoll.DiLoCo(every=3), id="diloco"),
    pytest.param(atoll.Average(every=4), id="average"),
    pytest.param("ddp", id="ddp"),
]


@pytest.mark.parametrize("outer", OUTERS)
def test_the_others_read_on_for_a_member_that_is_not_replaced(outer: Any, tmp_path: Path) -> None:
    found = world(tmp_path, outer, members=3)

    body = killed_at_round(found, "w1", 3)
    results = found.groups.run(body, timeout_s=PATIENCE_S)
    assert isinstance(results[1], PeerLost)
    assert results[0] is None, results[0]
    assert results[2] is None, results[2]
    assert_each_once(found)


def killed_at_round(found: World, member: str, round_: int) -> Callable[[Any], None]:
    """Return a member's body; `member` dies when it joins this round."""

    def body(group: Any) -> None:
        if group.me == member:
            join = group.join

            def doomed(report: Any, **options: Any) -> Any:
                if report.round == round_:
                    found.groups.kill(member)
                return join(report, **options)

            group.join = doomed
        found.train(group)

    return body


def waits_from_round(found: World, group: Any, round_: int) -> None:
    """Let a member join this round and later ones once the other one is back.

    However late that one's thread is, the job is not over by then.
    """
    join = group.join

    def patient(report: Any, **options: Any) -> Any:
        if report.round >= round_:
            assert found.back.wait(PATIENCE_S)
        return join(report, **options)

    group.join = patient


@pytest.mark.parametrize("outer", [*OUTERS[:2], pytest.param(atoll.NoSync(every=3), id="alone")])
def test_a_new_process_goes_on_at_the_committed_place(outer: Any, tmp_path: Path) -> None:
    found = world(tmp_path, outer)
    body = killed_at_round(found, "w1", 4)

    def replaced(group: Any) -> None:
        if group.me == "w0":
            waits_from_round(found, group, 4)
        try:
            body(group)
        except PeerLost:
            found.train(found.groups.add("w1"), late=True)

    found.groups.together(replaced, timeout_s=PATIENCE_S)
    assert found.lost, "the process died in the middle of its period"
    assert_each_once(found)


@pytest.mark.parametrize("round_", [4, 5])  # inside a pass, and at its end
def test_steps_of_a_member_left_behind_are_given_again(round_: int, tmp_path: Path) -> None:
    found = world(tmp_path, atoll.DiLoCo(every=3))
    machine = found.groups.coordinator.machine

    def body(group: Any) -> None:
        if group.me == "w1":
            join = group.join

            def frozen(report: Any, **options: Any) -> Any:
                if report.round == round_:
                    found.groups.lose("w1")
                    deadline = time.monotonic() + PATIENCE_S
                    while machine.committed_round <= round_ and time.monotonic() < deadline:
                        time.sleep(0.01)
                return join(report, **options)

            group.join = frozen
        else:
            waits_from_round(found, group, round_ + 1)
        found.train(group)

    found.groups.together(body, timeout_s=PATIENCE_S)
    assert found.lost
    assert_each_once(found)


@pytest.mark.parametrize("members", [1, 2])
def test_a_stopped_job_goes_on_where_it_was(members: int, tmp_path: Path) -> None:
    first = world(tmp_path, atoll.DiLoCo(every=3), members=members)
    first.stop_at = 4
    first.groups.together(first.train, timeout_s=PATIENCE_S)
    assert 0 < first.read.total() < EPOCHS * SAMPLES
    again = first.again()
    again.groups.together(again.train, timeout_s=PATIENCE_S)
    assert_each_once(again)


def test_different_orders_are_refused_at_the_first_round(tmp_path: Path) -> None:
    """The order is made where no seed reaches it: here by the member itself."""
    found = world(tmp_path, atoll.DiLoCo(every=3))

    def shard(run: Run) -> Any:
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(run.slot)).tolist()
        data = loader().dataset
        return run.shard(DataLoader(data, batch_size=BATCH, sampler=order))

    found.shard = shard
    errors = found.groups.run(found.train, timeout_s=PATIENCE_S)
    assert any(isinstance(error, DataError) for error in errors), errors
    assert any("draw different orders" in str(error) for error in errors)


def test_members_that_all_stay_read_each_sample_once(tmp_path: Path) -> None:
    found = world(tmp_path, atoll.DiLoCo(every=3), members=3)
    found.groups.together(found.train, timeout_s=PATIENCE_S)
    assert_each_once(found)
