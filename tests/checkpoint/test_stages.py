"""A model saved by stages loads into one process, into other stages, and the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from atoll.checkpoint.files import write_file
from atoll.checkpoint.format.part import Part, part_blocks, read_part
from atoll.checkpoint.format.pieces import entry
from atoll.checkpoint.sharded import (
    ShardedInfo,
    Trained,
    export_sharded,
    load_sharded,
    save_sharded,
)
from atoll.checkpoint.stages import load_stage, parts_with, stage_part
from atoll.checkpoint.stores.folder import Folder
from atoll.errors import CheckpointError, CheckpointMissing
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.strategies.inner.swarm.stage import StageCut
from atoll.wire.manifest import (
    ABOUT_NAME,
    MANIFEST_NAME,
    PIECES_FORMAT,
    Manifest,
    ManifestPart,
    checkpoint_folder,
    encode_manifest,
    piece_file,
)
from tests.strategies.swarm.kit import batch_of, built, fresh, means, runners, through

INFO = ShardedInfo(step=2)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def stages_of(stages: int, *, seed: int = 3) -> list[tuple[StageRunner, torch.optim.Optimizer]]:
    path = runners("layers", cut=StageCut(stages=stages), model=lambda name: fresh(name, seed=seed))
    return [(runner, adamw(runner.stage.parameters().values())) for runner in path]


def step(path: list[tuple[StageRunner, torch.optim.Optimizer]], number: int) -> None:
    key, own = MicrobatchKey(number, 0), [runner for runner, _ in path]
    for runner in own:
        runner.begin(number)
    through(own, key, batch_of("layers", number, 0))
    for runner in own:
        runner.fold(key)
    means(own)
    for _, optimizer in path:
        optimizer.step()


def state_of(path: list[tuple[StageRunner, torch.optim.Optimizer]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for runner, optimizer in path:
        trained = Trained(runner.stage, optimizer)
        found |= trained.model_tensors() | trained.optimizer_tensors()
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save_stage(folder: Path, round_: int, stage: int, trained: Trained) -> ManifestPart:
    """Write the file of one stage into a round's folder, which must be there."""
    part = stage_part(trained, stage)
    path = folder / checkpoint_folder(round_) / part.name
    written = write_file(path, part_blocks(part.tensors, part.metadata))
    return entry(part.name, f"stage{stage}", written)


def publish_stages(folder: Path, round_: int, parts: list[ManifestPart]) -> None:
    """Complete a checkpoint of which every stage's file is written, as the hub does."""
    place = folder / checkpoint_folder(round_)
    written = write_file(place / ABOUT_NAME, [msgspec.json.encode(INFO)])
    manifest = Manifest(
        job=folder.name, round=round_, step=INFO.step, members=[part.member for part in parts],
        parts=[*parts, entry(ABOUT_NAME, parts[0].member, written)], created=0.0,
        versions={"format": PIECES_FORMAT},
    )  # fmt: skip
    write_file(place / MANIFEST_NAME, [encode_manifest(manifest)])


def saved(folder: Path, stages: int) -> list[tuple[StageRunner, torch.optim.Optimizer]]:
    path = stages_of(stages)
    for number in range(2):
        step(path, number)
    Folder(folder).begin(1)
    parts = [
        save_stage(folder, 1, place, Trained(runner.stage, optimizer))
        for place, (runner, optimizer) in enumerate(path)
    ]
    publish_stages(folder, 1, parts)
    return path


@pytest.mark.parametrize("others", [1, 2, 4])
def test_other_stages_go_on_where_these_stopped(tmp_path: Path, others: int) -> None:
    path, again = saved(tmp_path, 3), stages_of(others, seed=8)
    for runner, optimizer in again:
        trained = Trained(runner.stage, optimizer)
        assert load_sharded(tmp_path, 1, trained, partly=True).step == 2
    assert_same(state_of(again), state_of(path))
    for one in (path, again):
        step(one, 2)
    assert_same(state_of(again), state_of(path))


@pytest.mark.parametrize(("stages", "read"), [(3, [1, 1, 1]), (1, [3]), (2, [1, 3])])
def test_a_stage_reads_no_more_files_than_it_needs(
    tmp_path: Path, stages: int, read: list[int]
) -> None:
    path, again = saved(tmp_path, 3), stages_of(stages, seed=8)
    folder = tmp_path / checkpoint_folder(1)
    names = [piece_file(stage) for stage in range(3)]
    for stage, (runner, optimizer) in enumerate(again):
        seen: list[str] = []

        def part_at(name: str, seen: list[str] = seen) -> Part:
            seen.append(name)
            return read_part(folder / name)

        trained = Trained(runner.stage, optimizer)
        load_stage(trained, parts_with(set(trained.model_tensors()), names, part_at, stage=stage))
        assert len(seen) == read[stage]
        assert seen[0] == piece_file(stage)
    assert_same(state_of(again), state_of(path))


def test_one_process_loads_all_stages_and_saves_for_them(tmp_path: Path) -> None:
    path, whole = saved(tmp_path / "swarm", 2), fresh("layers", seed=8)
    trained = Trained(whole, adamw(whole.parameters()))
    load_sharded(tmp_path / "swarm", 1, trained)
    assert_same(trained.model_tensors() | trained.optimizer_tensors(), state_of(path))
    assert len(export_sharded(tmp_path / "swarm", 1, tmp_path / "model.safetensors")) == 64
    save_sharded(tmp_path / "one", 1, trained, INFO)
    again = stages_of(4, seed=9)
    for runner, optimizer in again:
        load_sharded(tmp_path / "one", 1, Trained(runner.stage, optimizer), partly=True)
    assert_same(state_of(again), state_of(path))


def test_a_stage_alone_is_no_checkpoint(tmp_path: Path) -> None:
    ((first, optimizer), _) = stages_of(2)
    Folder(tmp_path).begin(1)
    part = save_stage(tmp_path, 1, 0, Trained(first.stage, optimizer))
    whole = built("layers")
    with pytest.raises(CheckpointMissing):
        load_sharded(tmp_path, 1, Trained(whole, None))
    publish_stages(tmp_path, 1, [part])
    with pytest.raises(CheckpointError, match="it lacks"):
        load_sharded(tmp_path, 1, Trained(whole, None))
    with pytest.raises(CheckpointError, match="only it has"):
        load_sharded(tmp_path, 1, Trained(stages_of(4)[0][0].stage, None))
