"""Save one member's checkpoints, in the background where there is a saver."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from atoll.checkpoint import (
    BackgroundSaver,
    DirectoryStore,
    Extras,
    OuterState,
    Saved,
    SavePoint,
    Store,
    collect,
)
from atoll.checkpoint.format.memory_image import image_nbytes
from atoll.strategies.base import Outer
from atoll.task import Task
from atoll.train.state.committed import exchanged_state

CARRIED = "carried"
"""Folder of the state that a process takes along into another mesh."""

SLACK_BYTES = 1 << 20
"""For counters and metadata that are not known yet."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Where checkpoints go: to a store, or to a background saver; without either, nowhere."""

    store: Store | None = None
    saver: BackgroundSaver | None = None
    carried: Store | None = None
    """Has the state that this process brings from another mesh of its island."""

    def reserve(self, task: Task, outer: Outer, *, shared: bool) -> None:
        """Allocate memory for later saves, once the optimizer has its state.

        An island needs none: its state is written to disk as the ranks send it.
        """
        if self.saver is None or task.elsewhere is not None:
            return
        task.pull()
        own, common = collect(task, _outer_state(task, outer), Extras())
        parts = (own, common) if shared else (own,)
        self.saver.reserve(sum(image_nbytes(part) for part in parts) + SLACK_BYTES)

    def save(
        self,
        task: Task,
        outer: Outer,
        extras: Extras,
        *,
        members: Sequence[str],
        final: bool,
        score: float | None = None,
    ) -> bool:
        """Save the state right after a committed round; return whether it was taken.

        Args:
            task: What is trained.
            outer: Its outer strategy.
            extras: What else the checkpoint holds.
            members: Members of the last round.
            final: The run ends here: wait for an earlier save instead of skipping this one.
            score: Held-out loss of this round, if it was evaluated.

        Raises:
            StorageFull: the store is full; never with a saver.
            HubError: the store cannot be reached; never with a saver.
        """
        if self.store is None and self.saver is None:
            return False
        task.pull()
        # All parts of a checkpoint carry the same step, also where members count their own.
        step = task.step if outer.one_state else outer.committed(task).step
        point = SavePoint(task.round, step, task.member, members, score)
        own, common = collect(task, _outer_state(task, outer), extras)
        parts = [own, common] if point.shared else [own]
        if self.saver is not None:
            return isinstance(self.saver.save(point, parts, final=final), Saved)
        if self.store is not None:
            self.store.put(point, parts)
        return True


NOT_SAVED = Saving()


def carrying(folder: Path) -> Saving:
    """Return where a process in a folder leaves the state for its next mesh."""
    shutil.rmtree(folder / CARRIED, ignore_errors=True)
    return Saving(DirectoryStore(folder / CARRIED, keep=1))


def carried(folder: Path, *, round_: int) -> Store | None:
    """Return the store of the state that was left after a round; None: it could not be stored."""
    store = DirectoryStore(folder / CARRIED, keep=1)
    return store if store.latest() == round_ else None


def _outer_state(task: Task, outer: Outer) -> OuterState:
    return OuterState(
        {**outer.state_dict(), **exchanged_state(task)}, own_model=not outer.one_model,
        base=outer.committed(task).base if outer.one_model else "", agreed=agreed(task, outer),
    )  # fmt: skip


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
