"""A stage whose members step by themselves, and meet as an outer method says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from atoll.checkpoint import Part
from atoll.checkpoint.stages import concerns
from atoll.config import StrategyTable
from atoll.group.single import SingleGroup
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.strategies.resolve import Resolved, resolve
from atoll.task import Task
from atoll.train.swarm.build import ROUND, STEP, JobStages, TrainedStage
from atoll.train.swarm.outer import StageOuter
from tests.train.swarm.kit import COUNT, job_of, place, step

DILOCO = StrategyTable(preset="diloco", options={"every": 2, "shared_steps": 9})


def outer(resolved: Resolved, rounds: int, task: Task, stage: ModelStage) -> StageOuter:
    group = SingleGroup()
    group.committed_round = rounds
    return StageOuter(resolved, group=group, task=task, stage=stage)


def stages_of(
    folder: Path, *, rounds: int = 0, layers: int = 2, count: int = 2
) -> tuple[JobStages, list[TrainedStage]]:
    made = partial(outer, resolve(DILOCO), rounds)
    stages = JobStages(
        job_of(folder, layers=layers), StageCut(stages=count), member="w0", outer=made
    )
    return stages, [stages.take(place(number)) for number in range(count)]


def parameters(path: list[TrainedStage]) -> list[torch.Tensor]:
    return [p.detach().clone() for stage in path for p in stage.task.parameters()]


def test_members_meet_after_so_many_steps_of_their_own(tmp_path: Path) -> None:
    stages, path = stages_of(tmp_path)
    rows = stages.rows(COUNT)
    step(path, rows, 0)
    assert [stage.task.round for stage in path] == [0, 0]
    assert not any(stage.evaluates for stage in path), "they do not agree now"
    step(path, rows, 1)
    assert [stage.task.round for stage in path] == [1, 1]
    assert all(stage.evaluates for stage in path)
    assert path[0].task.tokens == 2 * 8 * 16


def test_a_newcomer_starts_from_what_was_agreed_and_its_momentum(tmp_path: Path) -> None:
    stages, path = stages_of(tmp_path)
    rows = stages.rows(COUNT)
    for number in range(2):
        step(path, rows, number)
    parts = [stage.part() for stage in path]
    assert (parts[0].metadata[STEP], parts[0].metadata[ROUND]) == ("2", "1")
    news, own = stages_of(tmp_path, rounds=1)
    for stage in own:
        kept = {n for part in parts for n in part.tensors if concerns(n, stage.names())}
        assert any(".shared.outer." in name for name in kept)
        stage.take_over(parts, step=2, round_=1)
    assert all(stage.evaluates for stage in own)
    for number in range(2, 4):
        step(path, rows, number)
        step(own, news.rows(COUNT), number)
    for one, other in zip(parameters(path), parameters(own), strict=True):
        assert torch.equal(one, other)


def test_files_of_stages_hold_their_momentum_for_others(tmp_path: Path) -> None:
    """Two stages save, three go on as the two do: bit for bit."""
    stages, path = stages_of(tmp_path, layers=3)
    rows = stages.rows(COUNT)
    for number in range(2):
        step(path, rows, number)
    files = [stage.part() for stage in path]
    _, others = stages_of(tmp_path, rounds=1, layers=3, count=3)
    for stage in others:
        kept = [
            Part(part.name, {n: t for n, t in part.tensors.items() if concerns(n, stage.names())},
                 part.metadata)
            for part in files
        ]  # fmt: skip
        stage.take_over([part for part in kept if part.tensors], step=2, round_=1)
    for number in range(2, 4):
        step(path, rows, number)
        step(others, rows, number)
    for one, other in zip(parameters(path), parameters(others), strict=True):
        assert torch.equal(one, other)


def test_after_the_last_step_they_meet_before_it_is_saved(tmp_path: Path) -> None:
    stages, path = stages_of(tmp_path)
    step(path, stages.rows(COUNT), 0)
    assert [stage.task.round for stage in path] == [0, 0]
    for stage in path:
        stage.meet(last=True)
        stage.meet(last=True)
    assert [stage.task.round for stage in path] == [1, 1], "once: nothing was left then"


def test_between_a_step_and_its_round_none_takes_the_state(tmp_path: Path) -> None:
    _, path = stages_of(tmp_path)
    path[0].update(None, rows=0)
    assert (path[0].task.step, path[0].round, path[0].part().metadata[STEP]) == (1, 0, "0")
    path[0].meet()
    assert path[0].part().metadata[STEP] == "1"
    assert not path[0].identical


def test_steps_after_the_last_round_get_one_before_the_end(tmp_path: Path) -> None:
    stages, path = stages_of(tmp_path)
    for number in range(3):
        step(path, stages.rows(COUNT), number)
    assert [stage.task.round for stage in path] == [1, 1]
    for stage in path:
        stage.meet(last=True)
        stage.meet(last=True)  # again: nothing is left
    assert [stage.task.round for stage in path] == [2, 2]
    assert all(stage.evaluates for stage in path)


def test_dropped_updates_are_not_in_what_is_measured(tmp_path: Path) -> None:
    """With `drop`, members of a stage differ after a round; what they agree on is measured."""
    options = {"every": 2, "shared_steps": 0, "drop": 0.5}
    made = partial(outer, resolve(StrategyTable(preset="diloco", options=options)), 0)
    stages = JobStages(job_of(tmp_path), StageCut(stages=2), member="w0", outer=made)
    path = [stages.take(place(number)) for number in range(2)]
    step(path, stages.rows(COUNT), 0)
    own, start = parameters(path[:1]), path[0].outer
    assert start is not None
    with path[0].evaluating():
        agreed = parameters(path[:1])
    assert any(not torch.equal(one, other) for one, other in zip(own, agreed, strict=True))
    assert all(map(torch.equal, own, parameters(path[:1])))
