"""`atoll.join()`: join a job from any PyTorch script."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from atoll.config import (
    JobSpec,
    MeshShape,
    RankPlace,
    WorkerEnvironment,
    kept_place,
    load_spec,
    rank_place,
    shrunk,
    worker_environment,
)
from atoll.config.mesh import mesh_of
from atoll.group.single import SingleGroup
from atoll.island.start_phase import StartReport
from atoll.run.member import Run
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.join_job import join_job
from atoll.train.optim.lazy_compiler import leave_out_compiler

ALONE_SEED = 7


def join(*, mesh: Mapping[str, int] | None = None) -> Run:
    """Join the job that this process was started for; use it as a context manager.

    Started by `atoll run`, the process becomes a member of its job. Started by hand, it is a group
    of one without a hub, with the same interface:

        with atoll.join() as run:
            optimizer = run.wrap(model, optimizer, outer=atoll.DiLoCo(every=500), codec="int8")
            for batch in run.shard(loader):
                ...

    Several processes may form one member, an island: started by `atoll run` with `ranks` in
    `[island]`, or by torchrun. Each of them calls this; the first one communicates for all.

    Args:
        mesh: Layout of an island's ranks if the job file does not set it, e.g. `{"replicate": 2,
            "tensor": 2}`; by default all are along `shard`.

    Raises:
        HubUnreachable: the hub of the job does not answer.
        ConfigError: the environment of this process is incomplete, or the mesh does not divide the
            ranks.
    """
    leave_out_compiler()
    environment = worker_environment()
    if environment is None:
        ranks = _ranks(rank_place(), spec=None, mesh=mesh)
        if not ranks.leads:
            return _follow(ranks, member="w0", directory=Path.cwd(), seed=ALONE_SEED)
        return Run(
            SingleGroup(), slot=0, num_slots=1, directory=Path.cwd(), seed=ALONE_SEED, ranks=ranks
        )
    spec = load_spec(environment.spec)
    ranks = _ranks(kept_place(), spec=spec, mesh=mesh, directory=environment.directory)
    if not ranks.leads:
        return _follow(
            ranks, member=environment.member, directory=environment.directory,
            seed=spec.job.seed, job=environment.job,
        )  # fmt: skip
    return _enter(environment, spec, ranks)


def _follow(
    ranks: ScriptRanks, *, member: str, directory: Path, seed: int, job: str = "alone"
) -> Run:
    """Return the run object of a rank other than the first; imports are needed in islands only."""
    from atoll.run.follower import FollowerRun

    return FollowerRun(ranks=ranks, member=member, directory=directory, seed=seed, job=job)


def _enter(environment: WorkerEnvironment, spec: JobSpec, ranks: ScriptRanks) -> Run:
    asked = threading.Event()
    enrolled = join_job(environment, route=spec.job.route, should_stop=asked.is_set)
    place = enrolled.connection.registered
    return Run(
        enrolled.connection.group, slot=place.slot, num_slots=place.num_slots,
        directory=environment.directory, seed=spec.job.seed, enrolled=enrolled, asked=asked,
        checkpoint_every=spec.checkpoint.every, ranks=ranks,
    )  # fmt: skip


def _ranks(
    place: RankPlace | None,
    *,
    spec: JobSpec | None,
    mesh: Mapping[str, int] | None,
    directory: Path | None = None,
) -> ScriptRanks:
    """Return the ranks of this process's member, usually only itself."""
    if place is None:
        place = ScriptRanks.alone().place
    shape = spec.mesh if spec is not None else MeshShape()
    if shape.ranks == 1 or (spec is not None and not spec.island.mesh and mesh):
        shape = mesh_of("hybrid", ranks=0, mesh=mesh) if mesh else MeshShape(shard=place.ranks)
    if shape.ranks != place.ranks:  # a rank was lost, or the script runs alone
        shape = shrunk(shape, place.ranks) if place.ranks > 1 else MeshShape()
    if spec is None:
        return ScriptRanks(place, shape=shape)
    island = spec.island
    return ScriptRanks(
        place, shape=shape, device=island.device, timeout_s=island.timeout_s,
        start=StartReport(directory, rank=place.rank),
    )  # fmt: skip
