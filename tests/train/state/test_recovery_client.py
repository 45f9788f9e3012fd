"""A recovery that ends just as a look at it times out."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.errors import DeadlineExceeded
from atoll.group.base import Work
from atoll.recovery import Recovered
from atoll.strategies.base import Outer
from atoll.task import Task
from atoll.train.state.recovery_client import RecoveryClient, RolledBack
from atoll.wire.messages import Sources


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
