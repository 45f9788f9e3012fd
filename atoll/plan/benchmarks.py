"""Measures what a pipeline's plans need, on the real ranks: units, links, reductions, machines."""

from __future__ import annotations

import hashlib
import multiprocessing
import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
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
from atoll.errors import AtollError, JobError
from atoll.island.world import device_of, world
from atoll.plan.crowding import measured_rates
from atoll.plan.measured import Machine, Measured, UnitTimes
from atoll.plan.memory import plan_memory, sample, sizes_of
from atoll.plan.pipelines import Memory, PipelinePlan, with_plan
from atoll.plan.reductions import reductions
from atoll.plan.timed import LARGE, SMALL, fitted, shortest
from atoll.strategies.inner.model_facts import criterion_of
from atoll.strategies.inner.pipeline.cuts import UnitTime, profile
from atoll.strategies.inner.pipeline.hosts import Link
from atoll.strategies.inner.pipeline.stages import chain_of, check_chain
from atoll.strategies.inner.precision import precision_on
from atoll.train.build import whole_model

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

MOST_SIZES = 6
"""Sizes of microbatches that are measured; the smallest ones are left out."""
TURNS = 3
"""Measurements of all sizes, one after the other; the medians count."""
SPEED_WIDTH = 256
"""Width of the matrices with which machines are compared."""
ALIKE = 0.1
"""Speeds of machines that differ by less count as equal: the difference is noise."""
LEAST_MOVING = 0.1
"""Least share of a transfer's time that is not processor time."""
FORMAT = "3"
"""Version of the measurements that are kept on this machine; others are not read."""
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
    message: list[Any] = [None]
    found = None
    if place.leads:
        try:
            found = _measured_units(spec, device)
            message = [found]
        except AtollError as error:
            message = [error]
    dist.broadcast_object_list(message, src=0, device=device)
    if isinstance(message[0], AtollError):
        raise message[0]
    units: Measured = message[0]
    most = max(here.ranks for here in machines)
    rates = measured_rates(spec, units.sizes, most=most, place=place, device=device)
    reduce = reductions(units, on, device=device)
    if found is None:
        return None
    first = {here.machine: here for here in reversed(machines)}
    return replace(
        found,
        machines=tuple(
            _machine(here, speed=_relative(first[0].seconds / here.seconds), rates=rates)
            for _, here in sorted(first.items())
        ),
        near=near or far or UNUSED, far=far or near or UNUSED, reduce=reduce,
    )  # fmt: skip


def _machine(here: _Here, *, speed: float, rates: Mapping[int, Sequence[float]]) -> Machine:
    return Machine(
        name=here.name, ranks=here.ranks, cores=here.cores, speed=speed,
        memory_bytes=here.memory_bytes,
        rates=tuple(rate / speed for rate in rates.get(here.machine, ())),
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
    seconds = shortest(lambda: matrix @ matrix, device) if place.local_rank == 0 else 0.0
    return _Here(place.machine, platform.node(), ranks, cores, seconds, total)


def _link(a: int, b: int, device: torch.device) -> Link | None:
    """Return the link between two ranks; None on others and without two. Collective.

    Gloo copies with a processor: processor time is counted apart from the transfer's time.
    """
    if a == b:
        return None
    rank = dist.get_rank()
    times, busy = [], []
    for count in (SMALL, LARGE):
        values = torch.ones(count, device=device)

        def there_and_back(values: torch.Tensor = values) -> None:
            for sender, receiver in ((a, b), (b, a)):
                if rank == sender:
                    dist.send(values, dst=receiver)
                elif rank == receiver:
                    dist.recv(values, src=sender)

        if rank in (a, b):
            trip_s = shortest(there_and_back, device) / 2
            spent_s = shortest(there_and_back, device, clock=time.process_time) / 2
            busy.append(spent_s if device.type == CPU else 0.0)
            times.append(max(trip_s - 2 * busy[-1], LEAST_MOVING * trip_s))
    dist.barrier()
    if not times:
        return None
    per_byte = max(0.0, busy[1] - busy[0]) / (4 * LARGE)
    return replace(fitted(times), busy_s=busy[0], busy_s_per_byte=per_byte)


def _measured_units(spec: JobSpec, device: torch.device) -> Measured:
    """Return the times of a model's units for every size of microbatch; machines are missing."""
    data = sizes_of(spec)
    model = whole_model(spec, data)
    units, sure = chain_of(model)
    if not sure:
        check_chain(model, units, sample(data, model, rows=1)[0])
    model.train()
    precision = precision_on(spec.train.precision, device)
    batch = spec.train.batch
    sizes = [rows for rows in range(1, batch + 1) if batch % rows == 0][-MOST_SIZES:]
    profiles: dict[int, list[list[UnitTime]]] = {rows: [] for rows in sizes}
    for _ in range(TURNS):  # a change of load meets all sizes alike
        for rows in sizes:
            profiles[rows].append(
                profile(
                    units, criterion_of(model), *sample(data, model, rows=rows), device=device,
                    precision=precision, repeats=1,
                )
            )  # fmt: skip
    found = {rows: _medians(turns) for rows, turns in profiles.items()}
    sent = tuple(one.sent_bytes // sizes[-1] for one in profiles[sizes[-1]][0])
    trained = tuple(
        sum(p.numel() * p.element_size() for p in unit.parameters() if p.requires_grad)
        for unit in units
    )
    return Measured(
        machines=(), sizes=found, sent_bytes=sent, trained_bytes=trained, near=UNUSED, far=UNUSED
    )


def _medians(turns: Sequence[Sequence[UnitTime]]) -> UnitTimes:
    """Return the median times of every unit over several measurements of all of them."""
    units = list(zip(*turns, strict=True))
    return UnitTimes(
        forward_s=tuple(statistics.median(one.forward_s for one in unit) for unit in units),
        backward_s=tuple(statistics.median(one.backward_s for one in unit) for unit in units),
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
    key = hashlib.sha256("\n".join((FORMAT, *about, dump_spec(same))).encode()).hexdigest()[:24]
    return config.cache() / "pipelines" / f"{key}.json"


def measure_here(spec: JobSpec) -> Measured:
    """Measure with as many processes on this machine as the island has ranks.

    Raises:
        ConfigError: the model cannot be cut, or its data cannot be read.
        JobError: the processes did not end.
    """
    ranks, threads = spec.mesh.ranks, spec.job.threads
    found: Measured = together(_measure_rank, spec, ranks=ranks, threads=threads)
    return found


def _measure_rank(spec: JobSpec, place: RankPlace) -> Measured | None:
    device = device_of(place, wanted=spec.job.device)
    with world(place, device=device, timeout_s=spec.island.timeout_s):
        return measure(spec, place=place, device=device)


def together(
    function: Callable[[Any, RankPlace], Any], work: Any, *, ranks: int, threads: int = 0
) -> Any:
    """Run `function(work, place)` in `ranks` processes of this machine; return rank 0's result.

    `threads` are those of each process; 0: the cores are divided.

    Raises:
        AtollError: what it raised on rank 0.
        JobError: the processes did not start or did not end.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    context = _context()
    ours, theirs = context.Pipe()
    places = [RankPlace(rank, ranks, rank, "127.0.0.1", port) for rank in range(ranks)]
    processes = [
        context.Process(target=_be_rank, args=(theirs, function, work, place, threads), daemon=True)
        for place in places
    ]
    started = []
    try:
        with theirs:  # closed here, so that the pipe ends with the processes
            for process in processes:
                process.start()
                started.append(process)
        if not ours.poll(LONGEST_S):
            raise JobError("a measurement did not end", given=f"{LONGEST_S:.0f} s, {ranks} ranks")
        found = ours.recv()
    except EOFError as error:
        raise JobError("a measurement failed", given=f"{ranks} ranks") from error
    except OSError as error:
        raise JobError("a measurement failed", given=f"{ranks} ranks ({error})") from error
    finally:
        for process in started:
            if len(started) == ranks:  # else they wait for one that does not come
                process.join(10.0)
            process.kill()
            process.join()
        ours.close()
    if isinstance(found, AtollError):
        raise found
    return found


def _context() -> Any:
    """Return how processes start: as forks of one that has loaded everything, where possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo", "torch.distributed.pipelining"])
    return context


def _be_rank(
    pipe: Connection,
    function: Callable[[Any, RankPlace], Any],
    work: Any,
    place: RankPlace,
    threads: int,
) -> None:
    """Run one process of a measurement."""
    cores = len(system.usable_cpus())
    torch.set_num_threads(threads or max(1, cores // place.ranks))
    try:
        found = function(work, place)
    except AtollError as error:
        found = error
    if place.leads:
        pipe.send(found)
