"""What a policy learns from in one update, dealt out to minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, kw_only=True)
class Batch:
    """Whole columns of steps, [T, B, ...]; or, made `flat`, single steps side by side, [N, ...].

    A recurrent policy needs columns: what it remembers depends on the steps before.
    """

    prepared: Tensor
    """Observations as the layers take them, [..., width]."""
    actions: Tensor
    """[..., numbers of an action]."""
    before: Tensor
    """ln π of the actions when they were taken."""
    advantages: Tensor
    hidden: Tensor | None = None
    """[B, H]: what a recurrent policy remembered before the first step."""
    ended: Tensor | None = None
    """[T, B], bool: where a recurrent policy forgets."""

    @property
    def items(self) -> int:
        """How many steps or columns there are to deal out."""
        return self.before.shape[-1]

    def flat(self) -> Batch:
        """Return it as single steps."""
        return Batch(
            prepared=self.prepared.flatten(0, 1), actions=self.actions.flatten(0, 1),
            before=self.before.flatten(), advantages=self.advantages.flatten(),
        )  # fmt: skip

    def picked(self, order: Tensor) -> Batch:
        """Return its items of these numbers, in this order."""
        axis = self.before.dim() - 1
        return Batch(
            prepared=self.prepared.index_select(axis, order),
            actions=self.actions.index_select(axis, order),
            before=self.before.index_select(axis, order),
            advantages=self.advantages.index_select(axis, order),
            hidden=None if self.hidden is None else self.hidden.index_select(0, order),
            ended=None if self.ended is None else self.ended.index_select(axis, order),
        )

    def split(self, count: int) -> Iterator[Batch]:
        """Yield `count` parts as equal as can be, which are views; never an empty one."""
        axis, count = self.before.dim() - 1, max(1, min(count, self.items))
        hidden = [None] * count if self.hidden is None else self.hidden.tensor_split(count)
        ended = [None] * count if self.ended is None else self.ended.tensor_split(count, axis)
        parts = (self.prepared, self.actions, self.before, self.advantages)
        for prepared, actions, before, advantages, memory, ends in zip(
            *(part.tensor_split(count, axis) for part in parts), hidden, ended, strict=True
        ):
            yield Batch(
                prepared=prepared, actions=actions, before=before, advantages=advantages,
                hidden=memory, ended=ends,
            )  # fmt: skip
