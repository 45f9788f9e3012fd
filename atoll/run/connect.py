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
    rank_place,
    shrunk,
    supervised_place,
    worker_environment,
    worker_spec,
)
from atoll.config.mesh import mesh_of
from atoll.group.single import SingleGroup
from atoll.island.start_phase import StartReport
from atoll.run.member import Run
from atoll.run.place import Membership
from atoll.train.island.script_ranks import ScriptRanks
from atoll.train.join_job import join_job
from atoll.train.optim.lazy_compiler import leave_out_compiler


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
        membership = Membership(Path.cwd())
        if not ranks.leads:
            return _follow(ranks, membership, member="w0")
        return Run(SingleGroup(), membership, ranks=ranks)
    spec = worker_spec(environment)
    ranks = _ranks(supervised_place(), spec=spec, mesh=mesh, directory=environment.directory)
    if not ranks.leads:
        membership = Membership(environment.directory, spec.job.seed, environment.job)
        return _follow(ranks, membership, member=environment.member)
    return _enter(environment, spec, ranks)


def _follow(ranks: ScriptRanks, membership: Membership, *, member: str) -> Run:
    """Return the run object of a rank other than the first; imports are needed in islands only."""
    from atoll.run.follower import FollowerRun

    return FollowerRun(ranks, membership, member=member)


def _enter(environment: WorkerEnvironment, spec: JobSpec, ranks: ScriptRanks) -> Run:
    leave_requested = threading.Event()
    enrolled = join_job(environment, spec.job, should_stop=leave_requested.is_set)
    registered = enrolled.connection.registered
    membership = Membership(
        environment.directory, spec.job.seed, environment.job,
        slot=registered.slot, num_slots=registered.num_slots,
        log=spec.log,
    )  # fmt: skip
    return Run(
        enrolled.connection.group, membership, enrolled=enrolled, leave_requested=leave_requested,
        saving=spec.checkpoint, ranks=ranks,
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
        place, shape=shape, device=spec.job.device, timeout_s=island.timeout_s,
        start=StartReport(directory, rank=place.rank),
    )  # fmt: skip
