"""What most outer strategies do not need to say."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from atoll.strategies.strategy import SyncResult
from atoll.task import Task


class OuterDefaults:
    """The parts of :class:`Outer` that have an ordinary answer."""

    shared_steps = 0
    one_model = True
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
