"""One optimizer step over all ranks of an island, led by rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from atoll.errors import LossNotFinite
from atoll.island.command_broadcaster import CommandBroadcaster
from atoll.strategies.base import Outer, StepResult, extend_history_hash
from atoll.strategies.inner.host_model import HostModel
from atoll.strategies.inner.local import count_targets
from atoll.strategies.inner.worker import GRADIENTS, STEP, UPDATE, Stepped
from atoll.strategies.outer.base import OuterDefaults
from atoll.task import Task


class IslandLeader:
    """Lets the ranks step together, and calls the outer strategy's hooks.

    Gradients stay in the island: a method that combines gradients of members sees none here.
    """

    def __init__(
        self,
        broadcaster: CommandBroadcaster,
        host_model: HostModel,
        *,
        after_round: Callable[[Outer], None] | None = None,
    ) -> None:
        """Lead the ranks.

        `after_round` is called with the strategy before the first step, and before the first one
        after every round, while no other thread can read the state.
        """
        self._broadcaster, self._host_model = broadcaster, host_model
        self._after_round, self._due = after_round, after_round is not None

    def step(self, task: Task, batch: tuple[Tensor, Tensor], outer: Outer) -> StepResult:
        """Do one step; see :meth:`Inner.step`.

        If gradients overflow in half precision the step makes no progress: it counts for rounds,
        but not for the learning rate.
        """
        if self._due and self._after_round is not None:
            with task.state_lock.moving():
                self._after_round(outer)
            self._due = False
        looks_on = getattr(type(outer), "gradients", None) is not OuterDefaults.gradients
        verb, rates = (GRADIENTS, {}) if looks_on else (STEP, {"lr": _rates(task)})
        done: Stepped = self._broadcaster.call(verb, batch, **rates)
        if not (done.updated or done.overflowed):
            raise _refused(task, done)
        tokens = count_targets(batch[1])
        task.tokens += tokens
        task.losses.add(done.loss if done.updated else None)
        task.overflowed, task.skipped = done.overflowed, False
        with task.state_lock.moving():
            if looks_on:  # two commands, because a method may change parameters in between
                outer.gradients(task)
                if done.updated:
                    self._broadcaster.call(UPDATE, lr=_rates(task))
            if done.updated:
                self._host_model.trained()
            task.advance(updated=done.updated)
            sync = extend_history_hash(task, outer.sync(task))
        self._due = self._due or sync is not None
        return StepResult(done.loss, done.norm, tokens, sync)


def _rates(task: Task) -> list[float]:
    return [float(group["lr"]) for group in task.optimizer.param_groups]


def _refused(task: Task, done: Stepped) -> LossNotFinite:
    what = "the loss" if not math.isfinite(done.loss) else "the gradient"
    return LossNotFinite(
        f"{what} is not finite; the update was refused on every rank",
        given=f"member {task.member}, step {task.step + 1}, loss {done.loss}, "
        f"gradient norm {done.norm}",
        expected="finite numbers",
        remedy="lower the learning rate, warm up longer, or set clip",
    )
