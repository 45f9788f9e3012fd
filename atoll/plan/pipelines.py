"""Chooses the stages and replicas of a pipeline for given machines. No torch.

The method is that of Varuna (Athlur et al., https://arxiv.org/abs/2111.04007): every number of
stages P and of replicas D is simulated with measured times, and the fastest is taken. The rows of a
batch stay the same, so the choice changes no result. P x D ranks are dealt to the machines as
evenly as their ranks allow, in order.

Legend: a batch of B rows passes through each of D replicas in m = B / (D r) microbatches of r rows.
The largest r that fits the memory is found by bisection; since a larger r means fewer microbatches
and a larger bubble, all r up to it are simulated.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.config import JobSpec, MeshShape
from atoll.config.train_checks import recomputed_every
from atoll.errors import ConfigError
from atoll.plan.measured import Machine, Measured, deal
from atoll.strategies.inner.options import NONE, ONE_EACH, OPPORTUNISTIC, PipelineShape
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.hosts import Host, Hosts
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """One way to divide a model and its batch."""

    stages: int
    """Ranks in a row."""
    replicas: int
    rows: int
    """Of a microbatch."""
    microbatches: int
    cuts: tuple[int, ...]
    predicted_s: float
    """A batch with its all-reduce."""
    reduce_s: float
    worst_bytes: int
    """Of the rank that needs most memory; 0: not limited."""
    schedule: str = ONE_EACH

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.stages * self.replicas

    @property
    def mesh(self) -> MeshShape:
        """The mesh of an island."""
        return MeshShape(replicate=self.replicas, pipeline=self.stages)


PLANS_FILE = "pipeline_plans.json"
"""In the folder of the member, which outlives its processes."""

Memory = Callable[[PipelinePlan], Sequence[int]]
"""Returns the bytes that each rank of a plan needs on its device; only its shape is known."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What stays the same for all plans of a job."""

    batch: int
    schedule: str = ONE_EACH
    chunks: int = 1
    recomputed: float = 0.0
    """Share of the forward pass that is computed again in the backward pass."""
    memory: Memory | None = None
    """None: everything fits."""

    @classmethod
    def of(cls, spec: JobSpec, *, memory: Memory | None = None) -> Request:
        """Return the request of a job."""
        every = recomputed_every(spec.train.recompute)
        share = 1.0 / every if every and spec.train.recompute != "matmul" else 0.0
        return cls(
            batch=spec.train.batch, schedule=spec.island.schedule, chunks=spec.island.chunks,
            recomputed=share, memory=memory,
        )  # fmt: skip

    def shape(self, stages: int, *, schedule: str = "") -> PipelineShape:
        """Return the schedule of a row, by default the job's; one rank alone has none."""
        if stages == 1:
            return PipelineShape(ONE_EACH, 1)
        return PipelineShape(schedule or self.schedule, stages, self.chunks)

    def schedules(self, measured: Measured, *, stages: int) -> tuple[str, ...]:
        """Return the schedules to choose from; of equally fast ones the first counts.

        On processors 1f1b may be done in opportunistic order, with the same result.
        """
        if stages == 1:
            return (ONE_EACH,)
        able = self.schedule == ONE_EACH and all(machine.cores for machine in measured.machines)
        return (OPPORTUNISTIC, ONE_EACH) if able else (self.schedule,)


def plan_pipelines(
    measured: Measured, request: Request, *, ranks: int | None = None
) -> list[PipelinePlan]:
    """Return the best plan of every number of stages and replicas that fits, the fastest first.

    `ranks` are the most to use; None: all of the machines.

    Raises:
        ConfigError: nothing fits the machines; the message has the nearest plan.
    """
    most = sum(machine.ranks for machine in measured.machines)
    most = most if ranks is None else min(ranks, most)
    found, tried = [], []
    for stages in range(1, most + 1):
        for replicas in range(1, most // stages + 1):
            each = []
            for schedule in request.schedules(measured, stages=stages):
                fitting, lacking = _best(
                    measured, request, stages=stages, replicas=replicas, schedule=schedule
                )
                each += fitting
                tried += lacking
            found += sorted(each, key=lambda plan: plan.predicted_s)[:1]
    if not found:
        raise _nothing_fits(tried, measured, request, ranks=most)
    return sorted(found, key=lambda plan: (plan.predicted_s, plan.ranks, plan.stages))


def plans_by_ranks(measured: Measured, request: Request) -> dict[int, PipelinePlan]:
    """Return the plan for each number of remaining ranks that can train the model.

    The machines are alike, so that the first ones represent whichever remain. Raises ConfigError,
    as `plan_pipelines`, if not even all of them can.
    """
    each = measured.machines[0].ranks
    found: dict[int, PipelinePlan] = {}
    for machines in range(1, len(measured.machines) + 1):
        some = dataclasses.replace(measured, machines=measured.machines[:machines])
        try:
            plans = plan_pipelines(some, request)
        except ConfigError:
            continue
        for ranks in range((machines - 1) * each + 1, machines * each + 1):
            best = next((plan for plan in plans if plan.ranks <= ranks), None)
            if best is not None:
                found[ranks] = best
    if not found:
        plan_pipelines(measured, request)  # raises
    return found


def write_plans(plans: Mapping[int, PipelinePlan], folder: Path) -> None:
    """Store plans by number of ranks in a member's folder; raises OSError."""
    path = folder / PLANS_FILE
    whole = path.with_suffix(".new")
    whole.write_bytes(msgspec.json.encode(plans))
    whole.replace(path)


def read_plans(folder: Path) -> dict[int, PipelinePlan]:
    """Return the plans of a member's folder; none if there are none, or they are damaged."""
    try:
        found = (folder / PLANS_FILE).read_bytes()
        return msgspec.json.decode(found, type=dict[int, PipelinePlan])
    except (OSError, msgspec.DecodeError):
        return {}


def _best(
    measured: Measured, request: Request, *, stages: int, replicas: int, schedule: str
) -> tuple[list[PipelinePlan], list[PipelinePlan]]:
    """Return the fastest plan that fits, or else the one that needs least memory; or neither."""
    shape, units = request.shape(stages, schedule=schedule), len(measured.sent_bytes)
    if shape.stages > units or request.batch % replicas:
        return [], []
    share = request.batch // replicas
    sizes = [
        rows
        for rows in sorted(measured.sizes)
        if share % rows == 0 and shape.works_with(share // rows)
    ]
    plans = [_plan(measured, request, shape, replicas, rows) for rows in sizes]
    memory = request.memory
    if memory is not None:
        # More rows at once never need less memory.
        known: dict[int, PipelinePlan] = {}

        def lacks(number: int) -> bool:
            known[number] = _with_memory(plans[number], memory)
            return not _fits(known[number], measured, request)

        able = bisect.bisect_left(range(len(plans)), True, key=lacks)
        if plans and not able:
            return [], [known[0]]
        plans = plans[:able]
    if not plans:
        return [], []
    timed = [predicted(plan, measured, request) for plan in plans]
    best = min(timed, key=lambda plan: (plan.predicted_s, plan.rows))
    if memory is not None:
        best = _with_memory(best, memory)
    return [best], []


def _plan(
    measured: Measured, request: Request, shape: PipelineShape, replicas: int, rows: int
) -> PipelinePlan:
    """Return a plan without times: where it is cut."""
    stages = shape.ranks
    times = measured.sizes[rows]
    costs = [
        forward * (1 + request.recomputed) + backward
        for forward, backward in zip(times.forward_s, times.backward_s, strict=True)
    ]
    of_rank = place_ranks(measured.machines, stages * replicas)
    speeds = [  # of the slowest replica of each stage
        min(measured.machines[of_rank[row * stages + stage % stages]].speed
            for row in range(replicas))
        for stage in range(shape.stages)
    ]  # fmt: skip
    return PipelinePlan(
        stages=stages, replicas=replicas, rows=rows,
        microbatches=request.batch // (replicas * rows),
        cuts=balanced(costs, stages=shape.stages, speeds=speeds),
        predicted_s=0.0, reduce_s=0.0, worst_bytes=0, schedule=shape.schedule,
    )  # fmt: skip


def place_ranks(machines: Sequence[Machine], ranks: int) -> tuple[int, ...]:
    """Return the machine of every rank: consecutive ranks, as evenly as the machines allow."""
    counts = deal([machine.ranks for machine in machines], ranks)
    return tuple(n for n, count in enumerate(counts) for _ in range(count))


def predicted(plan: PipelinePlan, measured: Measured, request: Request) -> PipelinePlan:
    """Return a plan with the simulated time of a batch."""
    shape = request.shape(plan.stages, schedule=plan.schedule)
    times = measured.sizes[plan.rows]
    parts = list(itertools.pairwise((0, *plan.cuts, len(times.forward_s))))
    forward = [sum(times.forward_s[a:b]) for a, b in parts]
    stage_times = StageTimes(
        forward_s=forward,
        backward_s=[sum(times.backward_s[a:b]) for a, b in parts],
        recompute_s=[request.recomputed * s for s in forward] if request.recomputed else (),
        sent_bytes=[measured.sent_bytes[b - 1] * plan.rows for _, b in parts],
    )
    wall_s = max(
        simulate(shape, stage_times, microbatches=plan.microbatches, hosts=hosts).wall_s
        for hosts in _rows_apart(plan, measured)
    )
    gradients = [0] * plan.stages  # of a rank, over its stages
    for stage, (a, b) in enumerate(parts):
        gradients[stage % plan.stages] += sum(measured.trained_bytes[a:b])
    reduce_s = measured.reduce_s(max(gradients), stages=plan.stages, replicas=plan.replicas)
    return dataclasses.replace(plan, predicted_s=wall_s + reduce_s, reduce_s=reduce_s)


def _rows_apart(plan: PipelinePlan, measured: Measured) -> Iterator[Hosts]:
    """Yield what has to be simulated together: all rows, or each kind of row by itself.

    Rows of which none shares a machine with another one do not affect each other.
    """
    of_rank = place_ranks(measured.machines, plan.ranks)
    machines = [
        Host(cores=m.cores or float("inf"), speed=m.speed, rates=m.rates) for m in measured.machines
    ]
    rows = [of_rank[at : at + plan.stages] for at in range(0, plan.ranks, plan.stages)]
    alone = sum(len(set(row)) for row in rows) == len(set(of_rank))
    links = {"near": measured.near, "far": measured.far}
    if not alone:
        yield Hosts(hosts=tuple(machines), of_rank=of_rank, **links)
        return
    kinds = {
        Hosts(
            hosts=tuple(machines[n] for n in dict.fromkeys(row)),
            of_rank=tuple(list(dict.fromkeys(row)).index(n) for n in row), **links,
        )
        for row in rows
    }  # fmt: skip
    yield from kinds


def _with_memory(plan: PipelinePlan, memory: Memory) -> PipelinePlan:
    return dataclasses.replace(plan, worst_bytes=max(memory(plan)))


def _fits(plan: PipelinePlan, measured: Measured, request: Request) -> bool:
    assert request.memory is not None
    have = [measured.machines[n].memory_bytes for n in place_ranks(measured.machines, plan.ranks)]
    needs = request.memory(plan)
    return all(not most or need <= most for need, most in zip(needs, have, strict=True))


def _nothing_fits(
    tried: Sequence[PipelinePlan], measured: Measured, request: Request, *, ranks: int
) -> ConfigError:
    if not tried:
        return ConfigError(
            "this batch cannot pass through a pipeline of these ranks",
            given=f"{request.batch} rows, {ranks} ranks, schedule = {request.schedule!r}",
            expected=f"parts of one of these numbers of rows: {sorted(measured.sizes)}",
        )
    least = min(tried, key=lambda plan: plan.worst_bytes)
    machine = min(measured.machines, key=lambda machine: machine.memory_bytes or 1 << 62)
    return ConfigError(
        "stages that fit no offered machine",
        given=f"{least.stages} stages x {least.replicas} replicas, {least.rows} rows at once: "
        f"{_size(least.worst_bytes)} on a rank; {machine.name} has {_size(machine.memory_bytes)}",
        expected=f"{_size(least.worst_bytes)} for each of {least.ranks} ranks, the least of all "
        "plans",
        remedy="more machines or memory, "
        + ('or recompute = "full" in [train]' if not request.recomputed else "or a smaller model"),
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB"


def with_plan(spec: JobSpec, plan: PipelinePlan) -> JobSpec:
    """Return a job that trains by a plan; its ranks are already assigned to machines."""
    several = plan.stages > 1
    mesh: Mapping[str, Any] = {"replicate": plan.replicas, "pipeline": plan.stages}
    island = dataclasses.replace(
        spec.island, elastic=False, machines=1, ranks=plan.ranks,
        mesh={axis: size for axis, size in mesh.items() if size > 1},
        microbatches=plan.microbatches if several else 0, cuts=list(plan.cuts),
        schedule=plan.schedule if several else ONE_EACH,
        chunks=spec.island.chunks if several else 1,
        activations=spec.island.activations if several else NONE,
    )  # fmt: skip
    # `fsdp` takes one rank, too.
    inner = ("hybrid" if plan.replicas > 1 else "pipeline") if several else "ddp"
    train = dataclasses.replace(spec.train, accumulate=1 if several else plan.microbatches)
    strategy = dataclasses.replace(spec.strategy, inner=inner if plan.ranks > 1 else "fsdp")
    return dataclasses.replace(spec, island=island, train=train, strategy=strategy)
