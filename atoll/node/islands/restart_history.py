"""How often an island has lost ranks, and with how many it starts again.

With `on_loss = "wait"` an island always starts with all ranks. With `shrink` the first death of a
rank may be chance, so the next start still has all ranks. If that one also loses a rank within
`STEADY_S`, every further start has one rank less, down to the fewest that hold one whole model. Out
of memory is never chance: it removes a rank at once. A start that ends in any other way, or works
for `STEADY_S`, resets the count. A lost host counts as one loss, with any number of ranks. An
elastic island counts in the same way, and a plan says what it does with the ranks that are left.
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
from atoll.plan.pipelines import PipelinePlan, with_plan

log = logging.getLogger(__name__)

HISTORY_FILE = "restarts.json"
"""In the folder of the member, which outlives its processes."""

SPEC_FILE = "island.toml"
"""Job file of the ranks if their mesh differs from the job's."""

STEADY_S = 60.0
"""Duration of a start that resets the count."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The number of consecutive starts that ended because a rank died by itself."""

    row: int = 0

    @classmethod
    def read(cls, folder: Path) -> RestartHistory:
        """Read the history from a member's folder; empty if there is none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return cls(max(0, int(json.loads((folder / HISTORY_FILE).read_text("utf-8"))["row"])))
        return cls()

    @staticmethod
    def known(folder: Path) -> bool:
        """Return whether an island has ended before in a member's folder."""
        return (folder / HISTORY_FILE).exists()

    def write(self, folder: Path) -> None:
        """Store it for the next start; ignored if the disk is full."""
        with contextlib.suppress(OSError):
            text = json.dumps({"row": self.row})
            (folder / HISTORY_FILE).write_text(text, encoding="utf-8", newline="\n")

    def after(self, *, died: bool, lacked_memory: bool, worked_s: float) -> RestartHistory:
        """Return the history after one more start that worked for `worked_s`.

        `died`: a rank died by itself; `lacked_memory`: because it ran out of memory.
        """
        if not died:
            return RestartHistory()
        row = 1 if worked_s >= STEADY_S else self.row + 1
        return RestartHistory(max(2, row) if lacked_memory else row)

    def shape(self, spec: JobSpec, *, most: int | None = None) -> MeshShape | None:
        """Return the mesh of the next start with at most `most` ranks (None: all those of the job).

        None if so few ranks cannot hold the model.
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
            if _splits_evenly(found, spec):
                return found
        return shrunk(whole, least)

    def plan(
        self, spec: JobSpec, plans: Mapping[int, PipelinePlan], *, most: int | None = None
    ) -> PipelinePlan | None:
        """Return the plan of the next start of an elastic island with at most `most` ranks.

        None if so few ranks cannot hold the model, or nothing is planned yet.
        """
        most = spec.mesh.ranks if most is None else most
        if not plans or most < min(plans):
            return None
        wanted = min(most, spec.mesh.ranks - max(0, self.row - 1), max(plans))
        return plans[max(min(plans), wanted)]


def with_shape(spec: JobSpec, shape: MeshShape) -> JobSpec:
    """Return a job with another mesh in its islands; its ranks are already assigned to hosts."""
    if shape == spec.mesh:
        return spec
    sizes: Mapping[str, Any] = dataclasses.asdict(shape)
    mesh = {axis: size for axis, size in sizes.items() if size > 1}
    island = dataclasses.replace(spec.island, ranks=shape.ranks, mesh=mesh, machines=1)
    strategy = spec.strategy
    if shape.ranks == 1 and strategy.inner == "hybrid":  # needs more than one rank
        strategy = dataclasses.replace(strategy, inner="fsdp")
    return dataclasses.replace(spec, island=island, strategy=strategy)


def spec_with(
    shape: MeshShape,
    *,
    spec: JobSpec,
    environment: WorkerEnvironment,
    plan: PipelinePlan | None = None,
) -> Path:
    """Return the job file for ranks in a mesh that may be smaller than the job's, or by a plan.

    Raises:
        JobError: the file cannot be written.
    """
    if plan is None and shape == spec.mesh:
        return environment.spec
    if plan is None:
        log.warning("ranks were lost: %s instead of %s", shape, spec.mesh)
    path = environment.directory / SPEC_FILE
    changed = with_shape(spec, shape) if plan is None else with_plan(spec, plan)
    try:
        path.write_text(dump_spec(changed), encoding="utf-8", newline="\n")
    except OSError as error:
        raise JobError(
            "a machine cannot write the job file of its ranks",
            given=f"{path} ({error})",
            remedy="check the disk of that machine",
        ) from error
    return path


def _splits_evenly(shape: MeshShape, spec: JobSpec) -> bool:
    """Return whether the rows of a batch divide among the ranks; scripts do it themselves."""
    if spec.kind != "trainer":
        return True
    parts = shape.data * spec.train.accumulate * max(1, spec.island.microbatches)
    return spec.train.batch % parts == 0
