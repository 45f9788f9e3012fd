"""A small job in stages, and its stages trained in a loop without members."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from atoll.checkpoint.format.memory_image import MemoryImage, part_of
from atoll.config import DataTable, JobSpec, JobTable, ModelTable, SwarmTable, TrainTable
from atoll.recovery import StateOf
from atoll.recovery.snapshot_cache import Still
from atoll.strategies.inner.swarm.runner import MicrobatchKey
from atoll.train.swarm.build import TrainedStage
from atoll.wire.swarm import SwarmPlace

COUNT = 4
"""Microbatches of a step."""


def job_of(folder: Path, *, layers: int = 2, **model: Any) -> JobSpec:
    (folder / "text.txt").write_text("".join(f"{n} squared is {n * n}. " for n in range(500)))
    options = {"width": 16, "heads": 2, "layers": layers, "context": 16, "tie": False, **model}
    return JobSpec(
        job=JobTable(name="swarm", nodes=1), data=DataTable(corpus=f"files:{folder}/text.txt"),
        model=ModelTable(name="gpt", options=options),
        train=TrainTable(steps=5, batch=8, lr=0.01, warmup=2, clip=100.0),
    )  # fmt: skip


def early(spec: JobSpec, number: int) -> JobSpec:
    """Return a job of which so many microbatches per step are computed on older weights."""
    swarm = SwarmTable(stages=2, microbatches=COUNT, schedule="async", early=number)
    train = replace(spec.train, optimizer="torch:NAdam")
    return replace(spec, swarm=swarm, train=train) if number else spec


def place(stage: int, step: int = 0, **more: Any) -> SwarmPlace:
    return SwarmPlace(epoch=1, stage=stage, step=step, **more)


def through(path: Sequence[TrainedStage], rows: Any, key: MicrobatchKey) -> None:
    """Take a microbatch forth and back; its gradients stay pending."""
    inputs, targets = rows(key.step, key.index)
    values: tuple[torch.Tensor, ...] = (inputs,)
    for stage in path[:-1]:
        values = stage.runner.forward(key, values)
    _, gradients = path[-1].runner.loss(key, values, targets)
    for stage in reversed(path[:-1]):
        gradients = stage.runner.backward(key, gradients)


def step(path: Sequence[TrainedStage], rows: Any, number: int) -> None:
    for index in range(COUNT):
        key = MicrobatchKey(number, index)
        through(path, rows, key)
        for stage in path:
            stage.runner.fold(key)
    for stage in path:
        vector, total = stage.runner.gradient()
        stage.update(vector, rows=total.rows)
        stage.meet()


def tensors_of(stage: TrainedStage) -> dict[str, torch.Tensor]:
    state = stage.state()
    return {**state.model_tensors(), **state.optimizer_tensors()}


def assert_same_state(found: TrainedStage, expected: TrainedStage) -> None:
    own, wanted = tensors_of(found), tensors_of(expected)
    assert set(own) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(own[name], tensor), name
    assert found.round == expected.round == found.runner.step
    assert found.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"]


class FromMembers:
    """States that come from members in this process, or from files."""

    def __init__(self) -> None:
        self.offered: dict[int, tuple[StateOf, Still]] = {}
        self.files: list[Any] = []

    def donated(self, place: SwarmPlace) -> Any:
        state, still = self.offered[place.stage]
        with still(timeout_s=1.0):
            return state.parts()[0]

    def saved(self, round_: int, model_tensors: Any, *, stage: int) -> Iterator[Any]:
        yield from self.files

    def save(self, part: Any, *, step: int, final: bool, failed: Any) -> None:
        self.files.append(part_of(MemoryImage(part).view, part.name))

    def offer(self, state: Any, still: Still) -> None:
        self.offered[state.runner.stage.number] = state, still
