"""One member of the built-in trainer, started as a node's worker starts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.checkpoint import Store
from atoll.config import JobSpec
from atoll.group.base import Group
from atoll.ids import slot_of
from atoll.train.results.outputs import Outputs
from atoll.train.state.saving import Saving
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered

if TYPE_CHECKING:
    from atoll.train.island.island_trainer import TrainerIsland


def train_member(
    spec: JobSpec,
    group: Group,
    folder: Path,
    *,
    store: Store | None = None,
    resume_round: int = -1,
    island: TrainerIsland | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **outputs: Any,
) -> dict[str, Any]:
    """Train one member and return its result; `outputs` are further fields of `Outputs`."""
    trainer = Trainer(
        spec, group=group, outputs=Outputs(folder, **outputs), saving=Saving(store), island=island
    )
    start = Registered(slot_of(group.me), spec.job.nodes, 0, False, resume_round=resume_round)
    return trainer.train(start, should_stop)
