"""What most outer strategies do not need to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from atoll.strategies.delta import Flat
from atoll.strategies.strategy import SyncResult
from atoll.task import Task

SHARED_STATE = "shared."
"""Start of the keys of a strategy's state that are equal on every member after a round."""


class OuterDefaults:
    """The parts of :class:`Outer` that have an ordinary answer."""

    shared_steps = 0
    one_model = True
    one_state = True
    inherits = True

    def gradients(self, task: Task) -> None:
        """Do nothing: gradients stay local."""

    def sync(self, task: Task) -> SyncResult | None:
        """Do nothing: parameters are not combined after a step."""
        return None

    def finish(self, task: Task) -> SyncResult | None:
        """Do nothing: every step was agreed on."""
        return None

    def evaluating(self, task: Task) -> AbstractContextManager[None]:
        """Leave the model as it is: members carry what they agreed on."""
        return nullcontext()

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state; see :meth:`Outer.state_dict`."""
        return {}

    def shared_state(self) -> dict[str, Tensor]:
        """Return the part of the state that a newcomer takes over; waits for nothing."""
        state = self.state_dict()
        return {key: value for key, value in state.items() if key.startswith(SHARED_STATE)}


@contextmanager
def carrying(flat: Flat, vector: Tensor) -> Iterator[None]:
    """Put a vector into a model's tensors inside; afterwards they are as before."""
    before = flat.read()
    flat.write(vector)
    try:
        yield
    finally:
        flat.write(before)
