"""What the first rank of an island does around a script's calls, so that the others follow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from atoll.strategies.inner.host_model import HostModel
from atoll.task import Task
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.results.script_meter import ScriptMeter

if TYPE_CHECKING:
    from atoll.train.island.script_model import RankModel


class ScriptLeader:
    """Implements :class:`atoll.strategies.wrapped_optimizer.OtherOptimizers` for an island."""

    def __init__(
        self, ranks: ScriptRanks, *, meter: ScriptMeter, on_leave: Callable[[], None]
    ) -> None:
        """Lead the ranks of a script.

        `on_leave` is called when another rank's process was asked to leave.
        """
        self._ranks, self._meter, self._on_leave = ranks, meter, on_leave
        self.host_model: HostModel | None = None
        """Of the model, once it is wrapped."""

    def task_of(
        self, model: nn.Module, optimizer: Optimizer, *, member: str, round_: int
    ) -> tuple[RankModel, Task]:
        """Return this rank's part of the model, and the task of the whole; every rank does it."""
        from atoll.train.island.script_model import RankModel, ScriptOptimizer

        broadcaster = self._ranks.broadcaster
        own = RankModel(model, optimizer, broadcaster=broadcaster, device=self._ranks.device)
        self.host_model = HostModel(broadcaster)
        whole = ScriptOptimizer(optimizer, model=own, broadcaster=broadcaster)
        return own, Task(own.whole, whole, member=member, round=round_, elsewhere=self.host_model)

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Run the body while the other ranks serve; an error in it ends the island."""
        self._arrive(place)
        yield
        self.go_on()

    def arrive(self, *, overflowed: bool) -> bool:
        """Come to a step with all ranks; return whether gradients overflowed on any."""
        self._ranks.report.overflowed = overflowed
        found = self._arrive("step")
        self._trained()
        return found

    def _arrive(self, place: str) -> bool:
        reply = self._ranks.arrive(place)
        if reply.loss is not None or reply.tokens:
            self._meter.log(loss=reply.loss, tokens=reply.tokens, values={})
        if reply.leave_requested:
            self._on_leave()
        return reply.overflowed

    def midway(self, *, skipped: bool) -> None:
        """Let them do their own optimizers' step, unless it is skipped, and return here."""
        self._ranks.go_on(midway=True, skipped=skipped)
        self._trained()

    def go_on(self) -> None:
        """Let the other ranks continue with the script."""
        self._ranks.go_on()

    def _trained(self) -> None:
        if self.host_model is not None:
            self.host_model.trained()


def is_spread(model: nn.Module) -> bool:
    """Return whether parameters are DTensors, without importing what defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(p, module.DTensor) for p in model.parameters())
