"""The other ranks of an island in a job of the built-in trainer: they serve rank 0."""

from __future__ import annotations

from atoll.config import JobSpec
from atoll.config.rank_environment import RankPlace
from atoll.island.start_phase import StartReport
from atoll.train.island.island_trainer import entered


def follow(spec: JobSpec, *, place: RankPlace, start: StartReport) -> int | None:
    """Serve rank 0 of an island until it ends.

    Returns the number of the start in which the ranks go on; None: they end.

    Args:
        spec: The job: model, data and mesh are those of the first rank.
        place: Which rank this is.
        start: Where it reports how far it has come at its start.

    Raises:
        ConfigError: the job names something that does not exist, or cannot be divided like that;
            the first rank raises the same.
        RuntimeError: another rank does not answer any more.
    """
    with entered(spec, place=place, start=start) as island:
        island.broadcaster.serve()
        return island.broadcaster.next_start
