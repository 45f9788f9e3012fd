"""Measures what a pipeline's plans need, on the real ranks: units, links, reductions, machines."""

from __future__ import annotations

import hashlib
import multiprocessing
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed

from atoll import config, system
from atoll.config import JobSpec, RankPlace, dump_spec
from atoll.devices.choose import CPU
from atoll.devices.facts import memory, name_of
from atoll.devices.runtime import synchronize
from atoll.errors import AtollError, JobError
from atoll.island.world import device_of, world
from atoll.plan.measured import Machine, Measured, UnitTimes
from atoll.plan.memory import plan_memory, sample, sizes_of
from atoll.plan.pipelines import Memory, PipelinePlan, with_plan
from atoll.strategies.inner.pipeline.cuts import profile
from atoll.strategies.inner.pipeline.simulation import Link
from atoll.strategies.inner.pipeline.stages import chain_of
from atoll.strategies.inner.precision import precision_on
from atoll.strategies.inner.whole import criterion_of
from atoll.train.build import whole_model

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

REPEATS = 9
"""Measurements of a transfer, a reduction or a machine; the shortest counts."""
SMALL, LARGE = 1, 2**20
"""Numbers of fp32 values of which transfers and reductions are timed."""
MOST_SIZES = 6
"""Sizes of microbatches that are measured; the smallest ones are left out."""
SPEED_WIDTH = 256
"""Of the matrices with which machines are compared."""
ALIKE = 0.1
"""Machines whose speeds differ by less count as equal: so much is noise."""
LONGEST_S = 600.0
UNUSED = Link(0.0, 1e12)
"""Of one rank alone; finite, so that it can be stored as JSON."""


@dataclass(frozen=True, slots=True)
class _Here:
    machine: int
    name: str
    ranks: int
    cores: int
    seconds: float
    """Of the comparison; 0 except on the first rank of a machine."""
    memory_bytes: int


def measure(spec: JobSpec, *, place: RankPlace, device: torch.device) -> Measured | None:
    """Measure the model of a job and the ranks of the process group; collective.

    Returns the result on rank 0, and None on the others.

    Raises:
        ConfigError: the model cannot be cut, or its data cannot be read.
    """
    machines: list[Any] = [None] * place.ranks
    dist.all_gather_object(machines, _here(place, device))
    on = [here.machine for here in machines]
    near = _link(0, next((r for r in range(1, place.ranks) if on[r] == on[0]), 0), device)
    far = _link(0, next((r for r in range(place.ranks) if on[r] != on[0]), 0), device)
    reduce = {ranks: _reduction(ranks, device) for ranks in range(2, place.ranks + 1)}
    failed: list[AtollError | None] = [None]
    found = None
    if place.leads:
        try:
            found = _measured_units(spec, device)
        except AtollError as error:
            failed = [error]
    dist.broadcast_object_list(failed, src=0, device=device)
    if failed[0] is not None:
        raise failed[0]
    if found is None:
        return None
    first = {here.machine: here for here in reversed(machines)}
    return replace(
        found,
        machines=tuple(
            Machine(
                name=here.name, ranks=here.ranks, cores=here.cores,
                speed=_relative(first[0].seconds / here.seconds), memory_bytes=here.memory_bytes,
            )
            for _, here in sorted(first.items())
        ),
        near=near or far or UNUSED, far=far or near or UNUSED, reduce=reduce,
    )  # fmt: skip


def _relative(speed: float) -> float:
    return 1.0 if abs(speed - 1.0) < ALIKE else speed


def _here(place: RankPlace, device: torch.device) -> _Here:
    ranks = place.local_ranks or place.ranks
    cores, total = 0, memory(device)[0]
    if device.type == CPU:
        cores = max(1, len(system.usable_cpus()) // torch.get_num_threads())
        total = int(psutil.virtual_memory().available) // ranks
    matrix = torch.ones(SPEED_WIDTH, SPEED_WIDTH, device=device)
    seconds = _shortest(lambda: matrix @ matrix, device) if place.local_rank == 0 else 0.0
    return _Here(place.machine, platform.node(), ranks, cores, seconds, total)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    """Return the shortest of some runs, after one to warm up."""
    work()
    found = []
    for _ in range(REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found)


def _link(a: int, b: int, device: torch.device) -> Link | None:
    """Return the link between two ranks; None on others and without two. Collective."""
    if a == b:
        return None
    rank = dist.get_rank()
    times = []
    for count in (SMALL, LARGE):
        values = torch.ones(count, device=device)

        def there_and_back(values: torch.Tensor = values) -> None:
            for sender, receiver in ((a, b), (b, a)):
                if rank == sender:
                    dist.send(values, dst=receiver)
                elif rank == receiver:
                    dist.recv(values, src=sender)

        if rank in (a, b):
            times.append(_shortest(there_and_back, device) / 2)
    dist.barrier()
    return _fitted(times) if times else None


def _reduction(ranks: int, device: torch.device) -> Link:
    """Return the time of all-reduces, in as many groups at one time as there are ranks for.

    Collective; the ranks of a group are as far apart as replicas of pipelines are.
    """
    stages = dist.get_world_size() // ranks
    mine = None
    for position in range(stages):
        members = [position + stages * replica for replica in range(ranks)]
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    times = [0.0, 0.0]
    if mine is not None:
        for number, count in enumerate((SMALL, LARGE)):
            values = torch.zeros(count, device=device)
            work = lambda values=values: dist.all_reduce(values, group=mine)  # noqa: E731
            times[number] = _shortest(work, device)
    dist.barrier()
    return _fitted(times)


def _fitted(times: list[float]) -> Link:
    small, large = times
    # On a busy machine the small one may have taken as long.
    return Link(small, 4 * LARGE / max(large - small, large / 2, 1e-9))


def _measured_units(spec: JobSpec, device: torch.device) -> Measured:
    """Return the times of a model's units for every size of microbatch; machines are missing."""
    data = sizes_of(spec)
    model = whole_model(spec, data)
    units, _ = chain_of(model)
    model.train()
    precision = precision_on(spec.train.precision, device)
    batch = spec.train.batch
    sizes = [rows for rows in range(1, batch + 1) if batch % rows == 0][-MOST_SIZES:]
    found: dict[int, UnitTimes] = {}
    sent: tuple[int, ...] = ()
    for rows in sizes:
        times = profile(
            units, criterion_of(model), *sample(data, model, rows=rows), device=device,
            precision=precision,
        )  # fmt: skip
        found[rows] = UnitTimes(
            forward_s=tuple(one.forward_s for one in times),
            backward_s=tuple(one.backward_s for one in times),
        )
        sent = tuple(one.sent_bytes // rows for one in times)
    trained = tuple(
        sum(p.numel() * p.element_size() for p in unit.parameters() if p.requires_grad)
        for unit in units
    )
    return Measured(
        machines=(), sizes=found, sent_bytes=sent, trained_bytes=trained, near=UNUSED, far=UNUSED
    )


def memory_of(spec: JobSpec) -> Memory:
    """Return what predicts the memory of a plan's ranks, on fake tensors."""
    data = sizes_of(spec)
    limits = plan_memory(with_plan(spec, ONE), data=data).device == CPU

    def needs(plan: PipelinePlan) -> list[int]:
        found = plan_memory(with_plan(spec, plan), data=data)
        count = found.main_bytes if limits else found.device_bytes
        return [count(rank) for rank in found.ranks]

    return needs


ONE = PipelinePlan(
    stages=1, replicas=1, rows=1, microbatches=1, cuts=(), predicted_s=0.0, reduce_s=0.0,
    worst_bytes=0,
)  # fmt: skip
"""A whole model on one rank."""


# --------------------------------------------------------------------------- on this machine


def cache_path(spec: JobSpec) -> Path:
    """Return the file for the measurements of a model on this machine."""
    device = device_of(RankPlace(0, 1, 0, "", 0), wanted=spec.job.device)
    same = JobSpec(model=spec.model, data=spec.data, train=spec.train, island=spec.island)
    about = (platform.node(), name_of(device), torch.__version__, str(spec.job.threads))
    key = hashlib.sha256("\n".join((*about, dump_spec(same))).encode()).hexdigest()[:24]
    return config.cache() / "pipelines" / f"{key}.json"


def measure_here(spec: JobSpec) -> Measured:
    """Measure with as many processes on this machine as the island has ranks.

    Raises:
        ConfigError: the model cannot be cut, or its data cannot be read.
        JobError: the processes did not end.
    """
    found: Measured = together(_measure_rank, spec, ranks=spec.mesh.ranks)
    return found


def _measure_rank(spec: JobSpec, place: RankPlace) -> Measured | None:
    device = device_of(place, wanted=spec.job.device)
    with world(place, device=device, timeout_s=spec.island.timeout_s):
        return measure(spec, place=place, device=device)


def together(function: Callable[[JobSpec, RankPlace], Any], spec: JobSpec, *, ranks: int) -> Any:
    """Return what a module's function returns on rank 0 of some processes of this machine.

    Raises:
        AtollError: what it raised on rank 0.
        JobError: the processes did not end.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    places = [RankPlace(rank, ranks, rank, "127.0.0.1", port) for rank in range(ranks)]
    processes = [
        context.Process(target=_be_rank, args=(theirs, function, spec, place), daemon=True)
        for place in places
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        if not ours.poll(LONGEST_S):
            raise JobError("a measurement did not end", given=f"{LONGEST_S:.0f} s, {ranks} ranks")
        found = ours.recv()
    except EOFError as error:
        raise JobError("a measurement failed", given=f"{ranks} ranks") from error
    finally:
        for process in processes:
            process.join(10.0)
            process.kill()
    if isinstance(found, AtollError):
        raise found
    return found


def _be_rank(
    pipe: Connection,
    function: Callable[[JobSpec, RankPlace], Any],
    spec: JobSpec,
    place: RankPlace,
) -> None:
    """Be one process of a measurement."""
    cores = len(system.usable_cpus())
    torch.set_num_threads(spec.job.threads or max(1, cores // place.ranks))
    try:
        found = function(spec, place)
    except AtollError as error:
        found = error
    if place.leads:
        pipe.send(found)
