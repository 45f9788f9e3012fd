"""What a late member takes over from the hub's answer, and when a look at a recovery times out."""

from __future__ import annotations

from typing import Any, cast

import pytest

import atoll
from atoll.errors import DeadlineExceeded
from atoll.group.base import Work
from atoll.group.in_process.groups import MemoryGroups
from atoll.recovery import Recovered
from atoll.strategies.base import Outer
from atoll.task import Task
from atoll.train.state.committed import CommittedState
from atoll.train.state.recovery_client import RecoveryClient, RolledBack
from atoll.wire.messages import Sources
from tests.contracts.strategy_suite import start_run


class Late(Work[Recovered]):
    """Ends between the time-out of the first look and the next question."""

    looks = 0

    def wait(self, timeout_s: float | None = None) -> Recovered:
        self.looks += 1
        if self.looks == 1:
            self.finish(Recovered(3, "", None, None, [], 0.0, 0, Sources(3, [])))
            raise DeadlineExceeded("not yet")
        return super().wait(timeout_s)


class Hub:
    def recover(self, failed: Any = (), *, ready: bool = True) -> Sources:
        return Sources(3, [])

    def standing(self, round_: int, **about: Any) -> None:
        raise AssertionError("nothing was recovered")


def test_a_state_that_comes_as_a_look_ends_is_taken() -> None:
    client = RecoveryClient(
        cast(Any, Hub()), fetch=cast(Any, None), server=None, announce=lambda event: None
    )
    client._begun = Late()
    with pytest.raises(RolledBack):  # no member has it, as the answer says
        client.take(cast(Task, None), cast(Outer, None))


class MidPeriod(Hub):
    """Three tenths of a period are left."""

    round = 0

    def recover(self, failed: Any = (), *, ready: bool = True) -> Sources:
        return Sources(self.round, [], pace=0.3)

    def standing(self, round_: int, **about: Any) -> None:
        assert round_ == self.round


@pytest.mark.parametrize(("whole", "steps"), [(False, 3), (True, 10)])
def test_a_newcomer_does_the_steps_that_are_left(whole: bool, steps: int) -> None:
    """Also in a script, whose members all do the same steps: the others do not wait for it."""
    groups, hub = MemoryGroups(1), MidPeriod()
    donor = start_run(atoll.DiLoCo(every=10), groups[0], 0)
    donor.train(20)
    state, hub.round = CommittedState(donor.task, donor.outer), donor.task.round
    shared, inner = state.parts()

    def fetch(**about: Any) -> Recovered:
        return Recovered(hub.round, state.base, shared, inner, ["w0"], 0.0, 0, hub.recover())

    late = start_run(atoll.DiLoCo(every=10), groups.add(), 1, begin=False)
    late.task.whole_periods = whole
    client = RecoveryClient(
        cast(Any, hub), fetch=cast(Any, fetch), server=None, announce=lambda event: None
    )
    client.take(late.task, late.outer)
    assert (late.task.step, late.task.period.planned) == (20, steps)
