"""How often an island has lost ranks, and with how many it starts again.

By `on_loss = "wait"` an island always starts with all its ranks. By `shrink` the rule is this: one
rank that dies may be chance, so the next start still has all ranks. If that one loses a rank, too,
before it has worked for `STEADY_S`, every start has one rank less than the one before, down to the
least that holds one whole model. Out of memory is no chance: it takes a rank away at once. A start
that ends in any other way, or works for `STEADY_S`, ends the row, and the next has all ranks again.
A machine that is lost counts as one loss, whatever its number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.config import JobSpec, MeshShape, WorkerEnvironment, dump_spec, shrunk
from atoll.errors import JobError

log = logging.getLogger(__name__)

HISTORY_FILE = "restarts.json"
"""In the folder of the member, which outlives its processes."""

SPEC_FILE = "island.toml"
"""The job file of the ranks where their mesh is not that of the job."""

STEADY_S = 60.0
"""A start that has worked so long ends the row."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The number of starts in a row that ended because a rank died by itself."""

    row: int = 0

    @classmethod
    def read(cls, folder: Path) -> RestartHistory:
        """Return what is written in the folder of a member; none if nothing readable is."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return cls(max(0, int(json.loads((folder / HISTORY_FILE).read_text("utf-8"))["row"])))
        return cls()

    @staticmethod
    def known(folder: Path) -> bool:
        """Return whether an island has ended before in the folder of a member."""
        return (folder / HISTORY_FILE).exists()

    def write(self, folder: Path) -> None:
        """Remember it for the next start; a disk that is full forgets it."""
        with contextlib.suppress(OSError):
            text = json.dumps({"row": self.row})
            (folder / HISTORY_FILE).write_text(text, encoding="utf-8")

    def after(self, *, died: bool, lacked_memory: bool, worked_s: float) -> RestartHistory:
        """Return this after one more start.

        Args:
            died: A rank died by itself.
            lacked_memory: Because there was too little memory.
            worked_s: How long the start has lasted.
        """
        if not died:
            return RestartHistory()
        row = 1 if worked_s >= STEADY_S else self.row + 1
        return RestartHistory(max(2, row) if lacked_memory else row)

    def shape(self, spec: JobSpec, *, most: int | None = None) -> MeshShape | None:
        """Return the mesh of the next start; None: so few ranks cannot hold what they must.

        Args:
            spec: The job.
            most: How many ranks there can be; None: as many as the job wants.
        """
        whole = spec.mesh
        most = whole.ranks if most is None else most
        if spec.island.on_loss != "shrink":
            return whole if most >= whole.ranks else None
        least = whole.pipeline * whole.tensor
        if most < least:
            return None
        wanted = min(most, whole.ranks - max(0, self.row - 1))
        for ranks in range(max(least, wanted), least, -1):
            found = shrunk(whole, ranks)
            if _deals_evenly(found, spec):
                return found
        return shrunk(whole, least)


def with_shape(spec: JobSpec, shape: MeshShape) -> JobSpec:
    """Return a job whose islands have another mesh; its ranks have been dealt to machines."""
    if shape == spec.mesh:
        return spec
    sizes: Mapping[str, Any] = dataclasses.asdict(shape)
    mesh = {axis: size for axis, size in sizes.items() if size > 1}
    island = dataclasses.replace(spec.island, ranks=shape.ranks, mesh=mesh, machines=1)
    strategy = spec.strategy
    if shape.ranks == 1 and strategy.inner == "hybrid":  # which means more than one rank
        strategy = dataclasses.replace(strategy, inner="fsdp")
    return dataclasses.replace(spec, island=island, strategy=strategy)


def spec_with(shape: MeshShape, *, spec: JobSpec, environment: WorkerEnvironment) -> Path:
    """Return the job file for ranks in a mesh, which may be smaller than that of the job.

    Raises:
        JobError: the disk does not take it.
    """
    if shape == spec.mesh:
        return environment.spec
    log.warning("ranks were lost: %s instead of %s", shape, spec.mesh)
    path = environment.directory / SPEC_FILE
    try:
        path.write_text(dump_spec(with_shape(spec, shape)), encoding="utf-8")
    except OSError as error:
        raise JobError(
            "a machine cannot keep the job file of its ranks",
            given=f"{path} ({error})",
            remedy="look at the disk of that machine",
        ) from error
    return path


def _deals_evenly(shape: MeshShape, spec: JobSpec) -> bool:
    """Return whether the rows of a batch can be dealt to the ranks; scripts deal by themselves."""
    if spec.kind != "trainer":
        return True
    parts = shape.data * spec.train.accumulate * max(1, spec.island.microbatches)
    return spec.train.batch % parts == 0
