"""A rank that is killed anywhere: the other member commits, and the island comes back as it is."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import AtollError
from atoll.group.base import Work
from atoll.group.in_process.groups import MemoryGroup, MemoryGroups
from atoll.strategies.base import extend_history_hash
from atoll.train.state.committed import CommittedState
from tests.island import doomed
from tests.island.doomed import AFTER, BEFORE, ENDED, LOST, RANKS, STARTING, Start
from tests.island.leading import by_itself, table
from tests.island.pool import MEETINGS, free_port
from tests.patience import PATIENCE_S
from tests.tiers import sampled

KILLED = -signal.SIGKILL
IN_THE_ROUND = ("joining", "exchanging", "committing")
"""Moments when the first rank speaks with the others; followers wait for a command meanwhile."""
SPOKEN = {"join": "joining", "reduce": "exchanging", "commit": "committing"}
MOMENTS = (*STARTING, *BEFORE, *IN_THE_ROUND, *AFTER)
CASES = [
    (moment, victim)
    for place, moment in enumerate(MOMENTS)
    for victim in (0, 1 + (place + 1) % (RANKS - 1))
]
"""The first rank and one of the others at every moment; each of the others at several of them."""


class World:
    """A group of two: an island of processes, and a plain member in this process."""

    def __init__(self, folder: Path) -> None:
        self.groups = MemoryGroups(2, timeout_s=PATIENCE_S)
        self.folder, self.key = folder, secrets.token_bytes(16)
        self.listener = Listener(str(folder / "hub"), authkey=self.key)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.nursery = context.Process(target=doomed.nursery, args=(theirs,), daemon=True)
        self.nursery.start()
        theirs.close()
        self.pids: list[int] = []
        self.plain = by_itself(doomed.NAME, table(steps=10_000))
        self.outer = doomed.diloco(self.plain, self.groups[1])
        self.group = self.groups[0]
        self.moment, self.victim = "", -1
        self.standing = threading.Event()
        self.told: dict[int, str] = {}
        """Round -> the island's digest of the state after it."""
        self.own: dict[int, str] = {}
        """Round -> that of the plain member."""
        threading.Thread(target=self._serve, daemon=True).start()

    def start(self, *, late: bool = True, moment: str = "", victim: int = -1) -> None:
        """Start an island, one of whose ranks may be doomed."""
        if late:
            self.group = self.groups.add("w0")
        self.moment, self.victim = moment, victim
        self.standing.clear()
        for _ in range(MEETINGS):
            order = Start(
                free_port(), str(self.folder / "hub"), self.key, self.folder / "job", late,
                moment, victim,
            )  # fmt: skip
            self.pipe.send(order)
            self.pids = self._hear()
            if moment == "meeting" or self._hear():
                return
        raise AssertionError("the ranks did not meet")

    def _hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), "the ranks neither die nor end"
        return self.pipe.recv()

    def end(self) -> list[int]:
        """Wait until all ranks have ended; return how. Who has not met the others is killed."""
        found: dict[int, int] = {}
        while len(found) < RANKS:
            pid, status = self._hear()
            found[pid] = status
            if self.moment == "meeting" and len(found) == 1:
                for other in set(self.pids) - {pid}:  # as the supervisor of an island does
                    os.kill(other, signal.SIGKILL)
        with contextlib.suppress(AtollError):  # it may have left by itself
            self.groups.kill("w0")
        return [found[pid] for pid in self.pids]

    def period(self) -> Work[tuple[str, ...]]:
        """Let the plain member train through a round; it comes to who took part."""

        def through() -> tuple[str, ...]:
            contributors = doomed.period(self.plain)
            self.own[self.plain.task.round] = self.outer.committed(self.plain.task).base
            return contributors

        return Work.start(through, name="w1")

    def begin(self) -> None:
        """Start with the first island."""
        self.start(late=False)
        extend_history_hash(self.plain.task, self.outer.begin(self.plain.task))
        assert self.period().wait(PATIENCE_S) == ("w0", "w1")

    def close(self) -> None:
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.killpg(self.nursery.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self.nursery.join(10)
        self.listener.close()

    # --------------------------------------------------------------- what is otherwise the hub

    def _serve(self) -> None:
        """Do what first ranks of islands ask for, until there are no more."""
        while True:
            try:
                pipe = self.listener.accept()
            except OSError:
                return
            with pipe, contextlib.suppress(EOFError, OSError):
                while True:
                    pipe.send(self._answer(self.group, *pipe.recv()))

    def _answer(self, group: MemoryGroup, verb: str, given: Any, named: Any) -> Any:
        value, error = None, None
        try:
            value = self._do(group, verb, *given, **named)
        except AtollError as raised:
            error = raised
        names = ("members", "epoch", "committed_round", "stopping")
        return value, error, {name: getattr(group, name) for name in names}

    def _do(self, group: MemoryGroup, verb: str, *given: Any, **named: Any) -> Any:
        if self.moment and SPOKEN.get(verb) == self.moment:
            os.kill(self.pids[self.victim], signal.SIGKILL)
            if not self.victim:
                raise EOFError
        if verb == "state":
            return CommittedState(self.plain.task, self.outer).parts()
        if verb == "told":
            self.told[given[0]] = given[1]
            return None
        found = getattr(group, verb)(*given, **named)
        if verb == "standing":
            self.standing.set()
        return found.wait(PATIENCE_S) if verb == "reduce" else found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One job for all: an island that is killed and comes back, again and again."""
    made = World(tmp_path_factory.mktemp("job"))
    made.begin()
    os.kill(made.pids[3], signal.SIGKILL)  # while nothing happens but waiting
    assert made.end() == [LOST, LOST, LOST, KILLED]
    yield made
    made.close()


@pytest.mark.parametrize(
    ("moment", "victim"),
    sampled(
        CASES,
        lambda case: case[0] in ("exchanging", "committing"),
        "tests/island/test_killed_anywhere.py::test_the_others_commit_and_the_island_comes_back",
    ),
)
def test_the_others_commit_and_the_island_comes_back(
    world: World, moment: str, victim: int
) -> None:
    before = world.plain.task.round
    world.start(moment=moment, victim=victim)
    if moment in STARTING:
        ends = world.end()
    else:
        assert world.standing.wait(PATIENCE_S), "it has taken the state over"
        round_ = world.period()
        ends = world.end()
        alone = moment in BEFORE or (victim == 0 and moment in ("joining", "exchanging"))
        assert round_.wait(PATIENCE_S) == (("w1",) if alone else ("w0", "w1"))
    others = KILLED if moment == "meeting" else LOST
    assert ends == [KILLED if rank == victim else others for rank in range(RANKS)]
    assert world.period().wait(PATIENCE_S) == ("w1",)
    assert world.plain.task.round == before + (1 if moment in STARTING else 2)


def test_after_all_that_both_have_one_state(world: World) -> None:
    world.start()
    assert world.standing.wait(PATIENCE_S)
    for _ in range(2):
        assert world.period().wait(PATIENCE_S) == ("w0", "w1")
    world.groups.stop()
    assert world.period().wait(PATIENCE_S) == ("w0", "w1")
    assert world.end() == [ENDED] * RANKS
    common = world.told.keys() & world.own.keys()
    assert len(common) >= 3
    assert all(world.told[round_] == world.own[round_] for round_ in common)
