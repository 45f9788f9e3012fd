"""One optimizer step over all ranks of an island, as its first rank leads it."""

from __future__ import annotations

import math

from torch import Tensor

from atoll.errors import LossNotFinite
from atoll.island.crew import Crew
from atoll.strategies.inner.picture import Picture
from atoll.strategies.inner.worker import STEP, Stepped
from atoll.strategies.past import note
from atoll.strategies.strategy import Outer, StepResult
from atoll.task import Task


class Spread:
    """The ranks step together; the outer strategy has its two moments around that.

    Gradients stay in the island: a method that combines those of members has nothing to see here.
    What a method does after backward it does before it instead; parameters are the same then.
    """

    def __init__(self, crew: Crew, picture: Picture) -> None:
        """Lead the ranks of a crew, whose work makes the picture old."""
        self._crew, self._picture = crew, picture

    def step(self, task: Task, batch: tuple[Tensor, Tensor], outer: Outer) -> StepResult:
        """Do one step; see :meth:`Inner.step`.

        A step whose gradients overflowed in half precision is one without progress: rounds go on
        as if it had been taken, the learning rate does not.
        """
        inputs, targets = batch
        with task.gate.moving():
            task.overflowed = task.skipped = False
            outer.gradients(task)
        rates = [float(group["lr"]) for group in task.optimizer.param_groups]
        done: Stepped = self._crew.call(STEP, [inputs, targets], lr=rates)
        if not (done.taken or done.overflowed):
            raise self._refused(task, done)
        self._picture.trained()
        tokens = targets.numel()
        task.tokens += tokens
        task.losses.add(done.loss if done.taken else None)
        with task.gate.moving():
            task.overflowed = done.overflowed
            task.advance(taken=done.taken)
            return StepResult(done.loss, done.norm, tokens, note(task, outer.sync(task)))

    @staticmethod
    def _refused(task: Task, done: Stepped) -> LossNotFinite:
        what = "the loss" if not math.isfinite(done.loss) else "the gradient"
        return LossNotFinite(
            f"{what} is not finite; the update was refused on every rank",
            given=f"member {task.member}, step {task.step + 1}, loss {done.loss}, "
            f"gradient norm {done.norm}",
            expected="finite numbers",
            remedy="lower the learning rate, warm up longer, or set clip",
        )
