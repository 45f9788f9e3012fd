"""A reader between two moves sees a round and the hash of everything up to it together."""

from __future__ import annotations

from typing import Any

import pytest

import atoll
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.state_lock import StateLock
from tests.contracts.strategy_suite import Run, start_run

OPTIONS = [
    atoll.DiLoCo(every=3),
    atoll.EveryStep(),
    atoll.Streaming(every=6, fragments=2),
    atoll.SlowMo(every=3),
    atoll.Asynchronous(every=2, anchor_every=4),
]


class Watched(StateLock):
    """A lock that notes what others could see whenever the state comes to rest."""

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
        run, state_lock = start_run(options, group, int(group.me[1:])), Watched()
        run.task.state_lock = state_lock
        state_lock.look = lambda: run.task
        run.train(13)
        return run, state_lock

    for run, state_lock in MemoryGroups(2).together(body):
        assert len(state_lock.seen) > 2
        assert all(len(pasts) == 1 for pasts in state_lock.seen.values()), state_lock.seen
        assert len({min(pasts) for pasts in state_lock.seen.values()}) == len(state_lock.seen)
        assert run.task.past in state_lock.seen[run.task.round]
