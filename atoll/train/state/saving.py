"""Save one member's checkpoints, in the background where there is a saver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.checkpoint import BackgroundSaver, Saved, Store, collect
from atoll.checkpoint.format.memory_image import image_nbytes
from atoll.strategies.base import Outer
from atoll.task import Task


@dataclass(frozen=True, slots=True)
class Moment:
    """The metadata of a checkpoint, beyond the state of task and strategy."""

    members: tuple[str, ...]
    """The members of the last round."""
    shared: bool
    """Whether this member writes the shared part."""
    final: bool
    """The run ends here: wait for an earlier save instead of skipping this one."""
    score: float | None
    """Held-out loss of this round, if it was evaluated."""
    counters: Mapping[str, float | int | str]
    about: Mapping[str, str]
    cursor: Mapping[str, int]
    strategy: str
    """The name of the outer strategy."""
    kept: Sequence[Mapping[str, Any]] = ()
    """By rank: what a script keeps besides model and optimizer."""


SLACK_BYTES = 1 << 20
"""For counters and metadata that are not known yet."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go: to a store, or to a background saver; without either, nowhere."""

    store: Store | None
    saver: BackgroundSaver | None

    def reserve(self, task: Task, outer: Outer, *, shared: bool) -> None:
        """Allocate memory for later saves, once the optimizer has its state.

        An island needs none: its state is written to disk as the ranks send it.
        """
        if self.saver is None or task.elsewhere is not None:
            return
        task.pull()
        own, common = collect(
            task, outer=outer.state_dict(), codec={}, cursor={}, counters={}, about={},
            own_model=not outer.one_model, base="", leases=task.leases, agreed=agreed(task, outer),
        )  # fmt: skip
        parts = (own, common) if shared else (own,)
        self.saver.reserve(sum(image_nbytes(part) for part in parts) + SLACK_BYTES)

    def save(self, task: Task, outer: Outer, moment: Moment) -> bool:
        """Save the state right after a committed round; return whether it was taken.

        Raises:
            StorageFull: the store is full; never with a saver.
            HubError: the store cannot be reached; never with a saver.
        """
        if self.store is None and self.saver is None:
            return False
        task.pull()
        base = outer.committed(task).base if outer.one_model else ""
        # All parts of a checkpoint carry the same step, also where members count their own.
        step = task.step if outer.one_state else outer.committed(task).step
        own, common = collect(
            task, outer=outer.state_dict(), codec={}, cursor=moment.cursor,
            counters=moment.counters, about=moment.about, own_model=not outer.one_model,
            base=base, leases=task.leases, strategy=moment.strategy, agreed=agreed(task, outer),
            kept=moment.kept,
        )  # fmt: skip
        if self.saver is not None:
            outcome = self.saver.save(
                task.round, (own, common), step=step, member=task.member,
                members=moment.members, shared=moment.shared, base=base, final=moment.final,
                score=moment.score,
            )  # fmt: skip
            return isinstance(outcome, Saved)
        if self.store is not None:
            parts = [common, own] if moment.shared else [own]
            self.store.put(task.round, parts, step=step, member=task.member, members=moment.members)
        return True


def agreed(task: Task, outer: Outer) -> dict[str, Tensor]:
    """Return the common parameters by name where the task's own differ from them; not copied."""
    tensors = None if outer.one_model else outer.committed(task).tensors
    if tensors is None:
        return {}
    places = {
        id(t): found
        for t, found in zip([*task.parameters(), *task.buffers()], tensors, strict=True)
    }
    state = task.model.state_dict(keep_vars=True)
    return {name: places[id(value)] for name, value in state.items() if id(value) in places}
