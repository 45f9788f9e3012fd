"""The memory of a SWARM's stages, against stages that are really built and used."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from atoll.cli.planning.plan import app
from atoll.config import JobSpec, dump_spec, load_spec
from atoll.errors import ConfigError
from atoll.plan.memory import PROGRAM_BYTES
from atoll.plan.swarm import GRADIENT_BYTES, HELD, PENDING, fewest_stages, plan_swarm
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.train.swarm.build import JobStages
from atoll.wire.swarm import SwarmPlace
from bench.swarm.memory import job_of, measure
from tests.plan.jobs import job
from tests.train.swarm.kit import through

SWARM = 'preset = "swarm"'


def swarm(folder: Path, stages: int = 2, *, model: str = "gpt", sizes: str = "") -> JobSpec:
    sizes = sizes or ("layers = 4\nwidth = 32\nheads = 2\ncontext = 16" if model == "gpt" else "")
    more = f"[swarm]\nstages = {stages}\nmicrobatches = 4"
    return job(folder, model=model, strategy=SWARM, more=more, sizes=sizes or None)


@pytest.mark.parametrize("model", ["gpt", "vit"])
@pytest.mark.every(2)
def test_plan_equals_what_stages_really_hold(tmp_path: Path, model: str) -> None:
    spec = swarm(tmp_path, 3, model=model)
    plan = plan_swarm(spec)
    stages = JobStages(spec, StageCut(stages=3, cuts=plan.cuts), member="w0")
    path = [stages.take(SwarmPlace(epoch=1, stage=stage, step=0)) for stage in range(3)]
    assert path[0].runner.stage.cuts == plan.cuts
    rows = stages.rows(4)
    for index in range(4):
        through(path, rows, MicrobatchKey(0, index))
    for stage, planned in zip(path, plan.stages, strict=True):
        memory, parameters = planned.memory, stage.runner.stage.parameters().values()
        assert memory.parameters == sum(p.nbytes for p in parameters)
        assert memory.gradients == GRADIENT_BYTES * planned.elements
        kept = 4 * memory.inputs // HELD + 4 * memory.pending // PENDING
        assert stage.runner.held_bytes == kept
        for index in range(4):
            stage.runner.fold(MicrobatchKey(0, index))
        stage.update(stage.runner.gradient()[0], rows=1)
        state = stage.optimizer.state.values()
        held = sum(t.nbytes for one in state for t in one.values() if isinstance(t, torch.Tensor))
        assert memory.optimizer == held


def test_more_stages_need_less_each_and_the_fewest_are_found(tmp_path: Path) -> None:
    spec = swarm(tmp_path, 1)
    needs = {stages: plan_swarm(swarm(tmp_path, stages)) for stages in (1, 2, 4)}
    assert needs[1].worst_bytes > needs[2].worst_bytes > needs[4].worst_bytes
    found = fewest_stages(spec, limit_bytes=needs[2].worst_bytes)
    assert found is not None
    assert len(found.stages) == 2
    assert fewest_stages(spec, limit_bytes=1_000) is None


def test_plan_refuses_what_cannot_be_cut(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"stages = 7 in \[swarm\]"):
        plan_swarm(swarm(tmp_path, 9))
    tied = swarm(tmp_path, 2, sizes="layers = 2\nwidth = 16\nheads = 2\ncontext = 8\ntie = true")
    with pytest.raises(ConfigError, match="tie = false"):
        plan_swarm(tied)


def test_command_shows_stages_and_how_many_would_fit(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(dump_spec(swarm(tmp_path, 2)), encoding="utf-8")
    command = CliRunner(env={"COLUMNS": "80"})
    shown = command.invoke(app, ["memory", str(path)])
    assert shown.exit_code == 0
    assert "stage 0" in shown.output
    assert "pending gradients" in shown.output
    assert "the largest is stage" in shown.output
    figures = json.loads(command.invoke(app, ["memory", str(path), "--json"]).output)
    worst = figures["stages"][figures["worst"]]["needs_bytes"]
    limit = f"{(worst - 1_000) / 1e9:.9f}GB"
    large = command.invoke(app, ["memory", str(path), "--memory", limit])
    assert large.exit_code == 1
    assert "fits with stages =" in " ".join(large.output.split())


def test_option_makes_stages_of_a_job_without_any(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    plain = job(tmp_path, batch=16, sizes="layers = 4\nwidth = 16\nheads = 2\ncontext = 8")
    path.write_text(dump_spec(plain).replace("tie = true", ""), encoding="utf-8")
    command = CliRunner()
    found = command.invoke(app, ["memory", str(path), "--stages", "3", "--json"])
    assert found.exit_code == 0, found.output
    assert len(json.loads(found.output)["stages"]) == 3


def test_stages_have_equal_work_not_equal_weights(tmp_path: Path) -> None:
    """A look-up costs nothing, a large head much, the last stage computes one pass less."""
    sizes = "layers = 8\nwidth = 32\nheads = 2\ncontext = 16\ntie = false\nvocab_size = 4096"
    plan = plan_swarm(swarm(tmp_path, 2, sizes=sizes))
    block = plan.rows * (2 * 12 * 32 * 32 * 16 + 4 * 16 * 16 * 32)  # weights, attention; 16 tokens
    head = plan.rows * 2 * 32 * 4096 * 16
    (cut,) = plan.cuts
    blocks = cut - 2  # after embedding and dropout
    work = [4 * blocks * block, 3 * ((8 - blocks) * block + head)]
    assert [stage.flops for stage in plan.stages] == work
    others = [max(4 * n * block, 3 * ((8 - n) * block + head)) for n in range(1, 9)]
    assert max(work) == min(others)
    assert plan.balance == pytest.approx(sum(work) / (2 * max(work)))
    assert plan.stages[0].words.startswith("Embedding, Dropout, ")


def test_cuts_of_the_job_file_are_taken_as_they_are(tmp_path: Path) -> None:
    spec = swarm(tmp_path, 2)
    spec = replace(spec, swarm=replace(spec.swarm, cuts=[3]))
    assert plan_swarm(spec).cuts == (3,)
    with pytest.raises(ConfigError, match=r"(?s)the cuts do not make the stages.*in \[swarm\]"):
        plan_swarm(replace(spec, swarm=replace(spec.swarm, cuts=[3, 4])))


@pytest.mark.skipif(sys.platform == "win32", reason="the system reports no peak")
@pytest.mark.long("tests/plan/test_swarm_plan.py::test_plan_equals_what_stages_really_hold")
def test_a_member_of_a_stage_has_no_memory_for_the_whole(tmp_path: Path) -> None:
    """Real processes: one builds the whole model of 200 MB, one the third of eight stages."""
    path = job_of(tmp_path, stages=8, width=512, layers=16)
    plan = plan_swarm(load_spec(path))
    program = measure("program", path)["built"]
    whole = measure("whole", path)["built"]
    stage = measure("3", path)
    assert whole - program > 0.9 * plan.model_bytes
    own = plan.stages[3].memory
    sums = 8 * plan.stages[3].elements
    slack = 40_000_000  # freed memory that is not given back at once
    assert stage["built"] - program < plan.stages[3].building_bytes + sums + slack
    assert stage["built"] - program < 0.7 * (whole - program)
    assert stage["trained"] - program < plan.main_bytes(plan.stages[3]) - PROGRAM_BYTES + slack
    assert stage["trained"] - program > own.parameters + own.gradients + own.optimizer


def test_what_is_built_whole_is_said(tmp_path: Path) -> None:
    assert not plan_swarm(swarm(tmp_path)).whole
    sizes = "context = 16"
    spec = swarm(tmp_path, 2, model="tests.plan.test_swarm_plan:Guessed", sizes=sizes)
    plan = plan_swarm(spec)
    assert "the order of its layers is a guess" in plan.whole
    assert all(stage.building_bytes == plan.model_bytes for stage in plan.stages)


class Guessed(nn.Module):
    """Its children happen to be in the order in which they are applied."""

    def __init__(self, vocab_size: int, context: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, 8)
        self.last = nn.Linear(8, vocab_size)
        self.context = context

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.table(ids))
        return out
