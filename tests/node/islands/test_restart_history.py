"""The mesh of the next start, and which end of a rank is its cause."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.config import (
    IslandTable,
    JobSpec,
    MeshShape,
    StrategyTable,
    TrainTable,
    parse_spec,
)
from atoll.errors import AtollError, OutOfMemory, RankLost, ScriptError
from atoll.island.start_phase import RankPhase, StartPhase
from atoll.node.islands.failure_cause import RankExit, explain, root_cause
from atoll.node.islands.restart_history import STEADY_S, RestartHistory, spec_with, with_shape
from atoll.plan.pipelines import PLANS_FILE, PipelinePlan, read_plans, write_plans


def job_with(inner: str, *, batch: int = 12, on_loss: str = "shrink", **axes: int) -> JobSpec:
    return JobSpec(
        strategy=StrategyTable(inner=inner),
        island=IslandTable(mesh=axes, on_loss=on_loss),
        train=TrainTable(batch=batch),
    )


@pytest.mark.parametrize(
    ("spec", "row", "shape"),
    [
        (job_with("ddp", replicate=4), 1, MeshShape(replicate=4)),
        (job_with("ddp", replicate=4), 2, MeshShape(replicate=3)),
        (job_with("ddp", replicate=4), 9, MeshShape()),
        (job_with("ddp", replicate=4, batch=16), 2, MeshShape(replicate=2)),
        (job_with("ddp", replicate=4, on_loss="wait"), 9, MeshShape(replicate=4)),
        (job_with("hybrid", replicate=2, tensor=2), 2, MeshShape(tensor=2)),
        (job_with("hybrid", replicate=2, tensor=2), 9, MeshShape(tensor=2)),
        (job_with("pipeline", pipeline=3), 5, MeshShape(pipeline=3)),
    ],
)
def test_the_next_start_has_the_remaining_ranks_in_a_mesh(
    spec: JobSpec, row: int, shape: MeshShape
) -> None:
    assert RestartHistory(row).shape(spec) == shape
    changed = with_shape(spec, shape)
    assert changed.mesh == shape
    assert changed.mesh.ranks == changed.island.ranks or changed == spec


def plan_of(stages: int, replicas: int) -> PipelinePlan:
    return PipelinePlan(
        stages=stages, replicas=replicas, rows=2, microbatches=3, cuts=(1, 2)[: stages - 1],
        predicted_s=1.0, reduce_s=0.0, worst_bytes=0,
    )  # fmt: skip


PLANS = {2: plan_of(2, 1), 3: plan_of(3, 1), 4: plan_of(2, 2)}


@pytest.mark.parametrize(
    ("row", "most", "ranks"),
    [(0, None, 4), (1, None, 4), (2, None, 3), (9, None, 2), (0, 3, 3), (2, 2, 2), (0, 1, 0)],
)
def test_an_elastic_island_starts_by_the_plan_of_its_ranks(
    row: int, most: int | None, ranks: int
) -> None:
    spec = JobSpec(
        strategy=StrategyTable(inner="pipeline"), island=IslandTable(ranks=4, elastic=True)
    )
    assert RestartHistory(row).plan(spec, PLANS, most=most) == PLANS.get(ranks)
    assert RestartHistory(row).plan(spec, {}, most=most) is None


def test_the_ranks_job_file_has_the_plan(tmp_path: Path) -> None:
    spec = JobSpec(
        strategy=StrategyTable(inner="pipeline"), train=TrainTable(batch=12),
        island=IslandTable(ranks=4, elastic=True),
    )  # fmt: skip
    environment = SimpleNamespace(directory=tmp_path, spec=tmp_path / "job.toml")
    given: Any = environment
    assert spec_with(spec.mesh, spec=spec, environment=given) == environment.spec
    plan = PLANS[4]
    path = spec_with(plan.mesh, spec=spec, environment=given, plan=plan)
    found = parse_spec(path.read_text())
    assert (found.mesh, found.island.elastic) == (MeshShape(replicate=2, pipeline=2), False)
    assert (found.island.microbatches, found.island.cuts) == (3, [1])


def test_plans_survive_their_file(tmp_path: Path) -> None:
    assert read_plans(tmp_path) == {}
    write_plans(PLANS, tmp_path)
    assert read_plans(tmp_path) == PLANS
    (tmp_path / PLANS_FILE).write_text("{")
    assert read_plans(tmp_path) == {}


def test_losses_count_only_in_a_row_without_long_work(tmp_path: Path) -> None:
    history = RestartHistory()
    for _ in range(2):
        history = history.after(died=True, lacked_memory=False, worked_s=1.0)
    assert history == RestartHistory(2)
    history.write(tmp_path)
    assert RestartHistory.read(tmp_path) == history
    assert history.after(died=True, lacked_memory=False, worked_s=STEADY_S) == RestartHistory(1)
    assert history.after(died=False, lacked_memory=False, worked_s=1.0) == RestartHistory()
    assert RestartHistory().after(
        died=True, lacked_memory=True, worked_s=STEADY_S
    ) == RestartHistory(2)
    assert RestartHistory.read(tmp_path / "nowhere") == RestartHistory()


def test_first_end_of_its_own_accord_is_the_cause() -> None:
    lost, own = RankExit(0, 1, RankLost("gone")), RankExit(2, 1, ScriptError("raised"))
    left, killed = RankExit(1, 0), RankExit(3, -9, oom_kills=1)
    assert root_cause([left, lost, own, killed]) == own
    assert root_cause([left, lost]) == lost
    ready = dict.fromkeys(range(4), RankPhase(StartPhase.READY))
    error: AtollError = explain(killed, member="w0", phases=ready, timeout_s=1.0)
    assert isinstance(error, OutOfMemory)
    assert "rank 3 of the 4 of w0" in error.what
