"""The place, job and start with which a rank continues in another mesh."""

from __future__ import annotations

import gc
from dataclasses import replace

from atoll import config
from atoll.config import JobSpec, RankPlace, WorkerEnvironment
from atoll.island.morph_orders import MorphOrder
from atoll.island.start_phase import StartReport


def moved(
    order: MorphOrder, environment: WorkerEnvironment
) -> tuple[RankPlace, JobSpec, StartReport]:
    """Return the new place, job and start report of a rank that carries out an order."""
    gc.collect()  # frees what is left of the former mesh
    spec = config.worker_spec(replace(environment, spec=order.job_file))
    return order.place, spec, StartReport(environment.directory, rank=order.place.rank)
