"""A reader between two moves sees a round and the hash of everything up to it together."""

from __future__ import annotations

from typing import Any

import pytest

import atoll
from atoll.gate import Gate
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from tests.contracts.strategy_suite import Run, start_run

OPTIONS = [
    atoll.DiLoCo(every=3),
    atoll.EveryStep(),
    atoll.Streaming(every=6, fragments=2),
    atoll.SlowMo(every=3),
    atoll.Asynchronous(every=2, anchor_every=4),
]


class Watched(Gate):
    """A gate that notes what others could see whenever the state comes to rest."""

    def __init__(self) -> None:
        super().__init__()
        self.look: Any = lambda: None
        self.seen: dict[int, set[str]] = {}

    def _rest(self) -> None:
        task = self.look()
        if task is not None:
            self.seen.setdefault(task.round, set()).add(task.past)
        super()._rest()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: type(options).__name__)
def test_round_and_past_change_together(options: Any) -> None:
    def body(group: Group) -> tuple[Run, Watched]:
        run, gate = start_run(options, group, int(group.me[1:])), Watched()
        run.task.gate = gate
        gate.look = lambda: run.task
        run.train(13)
        return run, gate

    for run, gate in MemoryGroups(2).together(body):
        assert len(gate.seen) > 2
        assert all(len(pasts) == 1 for pasts in gate.seen.values()), gate.seen
        assert len({min(pasts) for pasts in gate.seen.values()}) == len(gate.seen)
        assert run.task.past in gate.seen[run.task.round]
