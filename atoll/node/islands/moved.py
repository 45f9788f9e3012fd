"""What a rank goes on with after an order to another place."""

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
    """Return place, job and start of a rank after an order."""
    gc.collect()  # what is left of the parts in the former mesh
    spec = config.worker_spec(replace(environment, spec=order.job_file))
    return order.place, spec, StartReport(environment.directory, rank=order.place.rank)
