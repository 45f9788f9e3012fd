"""Plans of pipelines: the best of all, within every machine's memory, for machines that differ."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.config import JobSpec, MeshShape, dump_spec, parse_spec
from atoll.errors import ConfigError, DataError
from atoll.plan.measured import Machine, Measured, UnitTimes, read_measured, write_measured
from atoll.plan.pipelines import (
    PipelinePlan,
    Request,
    place_ranks,
    plan_pipelines,
    plans_by_ranks,
    with_plan,
)
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.hosts import Host, Hosts, Link
from atoll.strategies.inner.pipeline.simulation import StageTimes, simulate

BATCH = 12
SIZES = (1, 2, 3, 4, 6, 12)


def measured(machines: tuple[Machine, ...], costs: list[float]) -> Measured:
    """Return units of these costs; more rows at once cost a little less for each."""
    return Measured(
        machines=machines,
        sizes={
            rows: UnitTimes(
                forward_s=tuple(c * (0.2 + 0.8 * rows) for c in costs),
                backward_s=tuple(2 * c * (0.2 + 0.8 * rows) for c in costs),
            )
            for rows in SIZES
        },
        sent_bytes=tuple(range(1, len(costs) + 1)), trained_bytes=(8,) * len(costs),
        near=Link(0.01, 100.0), far=Link(0.1, 10.0, busy_s=0.02, busy_s_per_byte=0.01),
        reduce={
            1: {2: Link(0.1, 100.0), 4: Link(0.3, 80.0)},
            2: {2: Link(0.2, 90.0), 3: Link(0.25, 70.0)},
        },
    )  # fmt: skip


def needs(plan: PipelinePlan) -> list[int]:
    """A rank needs memory for its share of the units, and for what it keeps."""
    held = [min(plan.stages - k, plan.microbatches) for k in range(plan.stages)]
    return [60 // plan.stages + 2 * plan.rows * kept for kept in held] * plan.replicas


def brute_force(found: Measured, request: Request) -> dict[tuple[int, int], float]:
    """Return the least time of every P x D that fits, by trying every size of microbatch."""
    ranks = sum(machine.ranks for machine in found.machines)
    best: dict[tuple[int, int], float] = {}
    counts = range(1, ranks + 1)
    shared = all(machine.cores for machine in found.machines)
    for stages, replicas, name in itertools.product(counts, counts, ("1f1b", "opportunistic")):
        shape, times = request.shape(stages, schedule=name), []
        if name == "opportunistic" and (stages == 1 or not shared):
            continue
        if stages * replicas > ranks or shape.stages > len(found.sent_bytes) or BATCH % replicas:
            continue
        on = place_ranks(found.machines, stages * replicas)
        machines = found.machines
        for rows, cost in found.sizes.items():
            count, rest = divmod(BATCH, replicas * rows)
            if rest or not shape.works_with(count):
                continue
            whole = [f + b for f, b in zip(cost.forward_s, cost.backward_s, strict=True)]
            speeds = [min(machines[on[r * stages + s]].speed for r in range(replicas))
                      for s in range(stages)]  # fmt: skip
            cuts = balanced(whole, stages=stages, speeds=speeds)
            plan = PipelinePlan(
                stages=stages, replicas=replicas, rows=rows, microbatches=count, cuts=cuts,
                predicted_s=0, reduce_s=0, worst_bytes=0,
            )  # fmt: skip
            have = [machines[n].memory_bytes for n in on]
            if request.memory and any(
                most and need > most for need, most in zip(needs(plan), have, strict=True)
            ):
                continue
            parts = list(itertools.pairwise((0, *cuts, len(whole))))
            played = simulate(
                shape,
                StageTimes(
                    forward_s=[sum(cost.forward_s[a:b]) for a, b in parts],
                    backward_s=[sum(cost.backward_s[a:b]) for a, b in parts],
                    sent_bytes=[rows * found.sent_bytes[b - 1] for _, b in parts],
                ),
                microbatches=count,
                hosts=Hosts(
                    hosts=tuple(Host(m.cores or float("inf"), m.speed, m.rates) for m in machines),
                    of_rank=on, near=found.near, far=found.far,
                ),
            )  # fmt: skip
            heaviest = max(sum(found.trained_bytes[a:b]) for a, b in parts)
            times.append(played.wall_s + found.reduce_s(heaviest, stages=stages, replicas=replicas))
        if times:
            best[stages, replicas] = min(*times, best.get((stages, replicas), math.inf))
    return best


MACHINES = st.builds(
    Machine, name=st.just("box"), ranks=st.integers(1, 2), cores=st.integers(0, 2),
    speed=st.sampled_from([0.5, 1.0, 2.0]), memory_bytes=st.sampled_from([0, 30, 50, 90]),
    rates=st.sampled_from([(), (0.9, 0.6)]),
)  # fmt: skip


@given(
    st.lists(MACHINES, min_size=1, max_size=3),
    st.lists(st.floats(0.1, 3.0), min_size=1, max_size=5),
    st.booleans(),
)
def test_the_best_of_all_plans_is_found(
    machines: list[Machine], costs: list[float], limited: bool
) -> None:
    found = measured(tuple(machines), costs)
    request = Request(batch=BATCH, memory=needs if limited else None)
    expected = brute_force(found, request)
    if not expected:
        with pytest.raises(ConfigError, match="stages that fit no offered machine"):
            plan_pipelines(found, request)
        return
    plans = plan_pipelines(found, request)
    assert {(p.stages, p.replicas): p.predicted_s for p in plans} == pytest.approx(expected)
    assert plans[0].predicted_s == pytest.approx(min(expected.values()))
    assert all(p.rows * p.microbatches * p.replicas == BATCH for p in plans)


def test_reductions_are_those_of_the_shape_or_of_the_next_larger() -> None:
    found = measured((Machine(name="box", ranks=1),), [1.0])
    seconds = [
        found.reduce_s(0.0, stages=p, replicas=d)
        for p, d in ((1, 1), (1, 2), (1, 3), (1, 9), (2, 2), (2, 3), (5, 2))
    ]
    assert seconds == [0.0, 0.1, 0.3, 0.3, 0.2, 0.25, 0.2]


def test_ranks_are_dealt_evenly_as_far_as_machines_have_them() -> None:
    machines = [Machine(name=str(n), ranks=n) for n in (4, 1, 3)]
    assert place_ranks(machines, 3) == (0, 1, 2)
    assert place_ranks(machines, 6) == (0, 0, 0, 1, 2, 2)
    assert place_ranks(machines, 8) == (0, 0, 0, 0, 1, 2, 2, 2)


def test_a_slow_machine_gets_fewer_units() -> None:
    machines = tuple(Machine(name=str(s), ranks=1, speed=s) for s in (1.0, 0.5))
    (two,) = [p for p in plan_pipelines(measured(machines, [1.0] * 6), Request(batch=BATCH))
              if p.stages == 2]  # fmt: skip
    assert two.cuts == (4,)


def test_stages_that_fit_nowhere_name_the_nearest_that_would() -> None:
    machines = (Machine(name="attic", ranks=2, memory_bytes=10),)
    with pytest.raises(ConfigError, match=r"2 stages x 1 replicas, 1 rows.*attic has.*recompute"):
        plan_pipelines(measured(machines, [1.0] * 4), Request(batch=BATCH, memory=needs))


def test_a_batch_without_measured_parts_is_refused() -> None:
    found = measured((Machine(name="box", ranks=1),), [1.0])
    with pytest.raises(ConfigError, match=r"7 rows.*\[2\]"):
        plan_pipelines(dataclasses.replace(found, sizes={2: found.sizes[2]}), Request(batch=7))


def test_every_number_of_ranks_that_can_train_has_a_plan() -> None:
    machines = tuple(Machine(name=f"m{n}", ranks=2, memory_bytes=45) for n in range(3))
    found = measured(machines, [1.0] * 6)
    plans = plans_by_ranks(found, Request(batch=BATCH, memory=needs))
    assert set(plans) == {2, 3, 4, 5, 6}  # one rank has not the memory
    assert all(plan.ranks <= ranks for ranks, plan in plans.items())
    for ranks in (2, 4, 6):
        some = dataclasses.replace(found, machines=machines[: ranks // 2])
        assert plans[ranks] == plan_pipelines(some, Request(batch=BATCH, memory=needs))[0]


JOB = """
[train]
batch = 12
[strategy]
inner = "pipeline"
[island]
ranks = 4
elastic = true
"""


@pytest.mark.parametrize(
    ("stages", "replicas", "mesh", "inner"),
    [
        (2, 2, MeshShape(replicate=2, pipeline=2), "hybrid"),
        (3, 1, MeshShape(pipeline=3), "pipeline"),
        (1, 3, MeshShape(replicate=3), "ddp"),
        (1, 1, MeshShape(), "fsdp"),
    ],
)
def test_a_plan_is_a_job_of_the_same_batch(
    stages: int, replicas: int, mesh: MeshShape, inner: str
) -> None:
    found = measured((Machine(name="box", ranks=4),), [1.0] * 6)
    spec: JobSpec = parse_spec(JOB)
    (plan,) = [p for p in plan_pipelines(found, Request.of(spec))
               if (p.stages, p.replicas) == (stages, replicas)]  # fmt: skip
    changed = parse_spec(dump_spec(with_plan(spec, plan)))  # valid, and the same when read again
    assert (changed.mesh, changed.strategy.inner, changed.island.elastic) == (mesh, inner, False)
    assert changed.train.batch == spec.train.batch
    assert changed.island.microbatches * changed.train.accumulate == (
        plan.microbatches if stages > 1 else 0
    )


def test_measurements_survive_their_file_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model.json"
    assert read_measured(path) is None
    found = measured((Machine(name="box", ranks=4, cores=2),), [1.0, 2.0])
    write_measured(found, path)
    assert read_measured(path) == found
    path.write_text('{"machines": 3}')
    with pytest.raises(DataError, match="delete this file"):
        read_measured(path)


def test_an_elastic_pipeline_is_not_asynchronous() -> None:
    with pytest.raises(ConfigError, match="replicas of a pipeline"):
        parse_spec(JOB + 'schedule = "async"\n')
