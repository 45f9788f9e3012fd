"""The first start of an elastic island: its ranks measure, and rank 0 stores the plans."""

from __future__ import annotations

from pathlib import Path

from atoll.config import JobSpec, RankPlace
from atoll.island.start_phase import StartPhase, StartReport
from atoll.island.world import device_of, world
from atoll.plan.benchmarks import measure, memory_of
from atoll.plan.measured import write_measured
from atoll.plan.pipelines import Request, plans_by_ranks, write_plans

MEASURED_FILE = "pipeline_measured.json"
"""In the folder of the member; `atoll plan pipeline --measured` reads it."""


def plan_island(spec: JobSpec, *, place: RankPlace, start: StartReport, folder: Path) -> None:
    """Measure the ranks of an island; on rank 0 store a plan for every number of ranks. Collective.

    Raises:
        ConfigError: the model cannot be cut, or it fits the memory of no number of ranks.
        OSError: `folder` cannot be written.
    """
    device = device_of(place, wanted=spec.job.device)
    start.enter(StartPhase.MEETING)
    with world(place, device=device, timeout_s=spec.island.timeout_s):
        start.enter(StartPhase.PREPARING if place.leads else StartPhase.WAITING)
        found = measure(spec, place=place, device=device)
    if found is not None:
        write_measured(found, folder / MEASURED_FILE)
        write_plans(plans_by_ranks(found, Request.of(spec, memory=memory_of(spec))), folder)
