"""The stages of a job train what its model trains in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from atoll.checkpoint.sharded import ShardedInfo
from atoll.checkpoint.stages import begin_stages, publish_stages, save_stage
from atoll.config import DataTable, JobSpec, JobTable, ModelTable, TrainTable
from atoll.data import BatchStream
from atoll.errors import CheckpointMissing, ConfigError
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.train.build import build
from atoll.train.swarm.build import JobStages, TrainedStage

COUNT, STEPS = 4, 3


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "text.txt").write_text("".join(f"{n} squared is {n * n}. " for n in range(500)))
    options = {"width": 16, "heads": 2, "layers": 2, "context": 16, "tie": False}
    return JobSpec(
        job=JobTable(name="swarm", nodes=1), data=DataTable(corpus=f"files:{tmp_path}/text.txt"),
        model=ModelTable(name="gpt", options=options),
        train=TrainTable(steps=5, batch=8, lr=0.01, warmup=2, clip=100.0),
    )  # fmt: skip


def step(path: list[TrainedStage], rows: object, number: int) -> None:
    assert callable(rows)
    for index in range(COUNT):
        key, (inputs, targets) = MicrobatchKey(number, index), rows(number, index)
        values: tuple[torch.Tensor, ...] = (inputs,)
        for stage in path[:-1]:
            values = stage.runner.forward(key, values)
        _, gradients = path[-1].runner.loss(key, values, targets)
        for stage in reversed(path[:-1]):
            gradients = stage.runner.backward(key, gradients)
        for stage in path:
            stage.runner.fold(key)
    for stage in path:
        stage.runner.apply(stage.runner.gradient()[0])
        stage.update()
        stage.runner.begin(number + 1)


def test_stages_of_a_job_follow_its_schedule_and_data(spec: JobSpec) -> None:
    built = build(spec, member="w0", slot=0, num_slots=1)
    stream = BatchStream(built.shards, slot=0, batch=spec.train.batch)
    stages = JobStages(spec, StageCut(stages=2), member="w0")
    path = [stages.take(stage, 0, []) for stage in range(2)]
    rows = stages.rows(COUNT)
    for number in range(STEPS):
        parts = [rows(number, index) for index in range(COUNT)]
        inputs, targets = next(stream)
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        built.task.optimizer.zero_grad()
        built.model.loss(inputs, targets).backward()
        built.task.optimizer.step()
        built.task.advance()
        step(path, rows, number)
    found = {n: p for stage in path for n, p in stage.runner.stage.parameters().items()}
    for name, parameter in built.model.named_parameters():
        assert torch.allclose(found[name], parameter, atol=2e-5), name
    assert path[0].optimizer.param_groups[0]["lr"] == built.task.optimizer.param_groups[0]["lr"]


def test_a_stage_goes_on_from_a_checkpoint_bitwise(spec: JobSpec, tmp_path: Path) -> None:
    newest: list[tuple[Path, int]] = []
    cut = StageCut(stages=2)
    stages = JobStages(spec, cut, member="w0", saved=lambda: newest[0] if newest else None)
    path = [stages.take(stage, 0, []) for stage in range(2)]
    rows = stages.rows(COUNT)
    step(path, rows, 0)
    with pytest.raises(CheckpointMissing, match="no checkpoint"):
        stages.take(0, 1, [])
    begin_stages(tmp_path, 1)
    parts = [save_stage(tmp_path, 1, n, stage.state()) for n, stage in enumerate(path)]
    publish_stages(tmp_path, 1, parts, ShardedInfo(step=1))
    newest.append((tmp_path, 1))
    again = [stages.take(stage, 1, []) for stage in range(2)]
    with pytest.raises(CheckpointMissing, match="of another step"):
        stages.take(0, 2, [])
    for stage in again:
        stage.runner.begin(1)
    for one in (path, again):
        step(one, rows, 1)
    for old, new in zip(path, again, strict=True):
        for name, parameter in old.runner.stage.parameters().items():
            assert torch.equal(new.runner.stage.parameters()[name], parameter), name


def test_a_batch_that_cannot_be_cut_is_refused(spec: JobSpec) -> None:
    with pytest.raises(ConfigError, match="batch = 8, 3 microbatches"):
        JobStages(spec, StageCut(stages=2), member="w0").rows(3)
