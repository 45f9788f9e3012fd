"""Sharded checkpoints of one process; those of several ranks are tests of the island."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from atoll.checkpoint.format.dcp_storage import PieceWriter
from atoll.checkpoint.format.part import Part
from atoll.checkpoint.format.pieces import PIECES, Pieces
from atoll.checkpoint.sharded import (
    ShardedInfo,
    Trained,
    alone_quietly,
    export_sharded,
    load_sharded,
    save_sharded,
    start_sharded,
)
from atoll.checkpoint.state.sharded_state import ties_of
from atoll.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing
from atoll.wire.manifest import MANIFEST_NAME, PIECES_FORMAT, checkpoint_folder
from atoll.wire.retention import Keep


def net(*, width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    model, optimizer = net()
    optimizer.param_groups[0]["lr"] = 0.025
    save_sharded(tmp_path, 3, Trained(model, optimizer), ShardedInfo(30))
    other, its_optimizer = net()
    load_sharded(tmp_path, 3, Trained(other, its_optimizer))
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])
    assert its_optimizer.param_groups[0]["lr"] == 0.025
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        momentum = optimizer.state[mine]["momentum_buffer"]
        assert torch.equal(its_optimizer.state[its]["momentum_buffer"], momentum)
    export_sharded(tmp_path, 3, tmp_path / "x.safetensors", texts={"note": "hello"})
    assert torch.equal(
        load_file(tmp_path / "x.safetensors")["weight"], model.state_dict()["weight"]
    )


def test_model_alone_is_saved_and_wrappers_leave_no_trace(tmp_path: Path) -> None:
    model, _ = net()
    save_sharded(tmp_path, 1, Trained(nn.DataParallel(model), None), ShardedInfo(1))
    other, its_optimizer = net()
    before = {key: dict(state) for key, state in its_optimizer.state.items()}
    load_sharded(tmp_path, 1, Trained(other, its_optimizer))
    assert torch.equal(other.state_dict()["bias"], model.state_dict()["bias"])
    assert its_optimizer.state.keys() == before.keys() or not its_optimizer.state


def test_tied_weight_is_saved_once_and_exported_twice(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 2), "head": nn.Linear(2, 5, bias=False)})
    model["head"].weight = model["embedding"].weight
    assert ties_of(model) == {"head.weight": "embedding.weight"}
    save_sharded(tmp_path, 1, Trained(model, None), ShardedInfo(1))
    held = load_file(tmp_path / checkpoint_folder(1) / "rank-00000.safetensors")
    assert set(held) == {"model/embedding.weight"}
    export_sharded(tmp_path, 1, tmp_path / "x.safetensors")
    model.load_state_dict(load_file(tmp_path / "x.safetensors"))


def test_same_round_again_replaces_and_older_ones_go(tmp_path: Path) -> None:
    for round_ in (1, 2, 2, 3):
        model, optimizer = net()
        save_sharded(
            tmp_path, round_, Trained(model, optimizer), ShardedInfo(round_), keep=Keep(newest=2)
        )
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["round-000002", "round-000003"]
    other, its_optimizer = net()
    load_sharded(tmp_path, 3, Trained(other, its_optimizer))
    assert torch.equal(other.state_dict()["weight"], model.state_dict()["weight"])


def test_one_that_nobody_finished_does_not_exist(tmp_path: Path) -> None:
    model, optimizer = net()
    saving = start_sharded(tmp_path, 1, Trained(model, optimizer), ShardedInfo(1))
    with pytest.raises(CheckpointMissing, match="round 1"):
        load_sharded(tmp_path, 1, Trained(model, optimizer))
    saving.finish()
    assert saving.written
    load_sharded(tmp_path, 1, Trained(model, optimizer))


def test_missing_or_mismatched_parts_are_named(tmp_path: Path) -> None:
    model, optimizer = net()
    with pytest.raises(CheckpointMissing, match="round 1"):
        load_sharded(tmp_path, 1, Trained(model, optimizer))
    save_sharded(tmp_path, 1, Trained(model, optimizer), ShardedInfo(1))
    wider, its_optimizer = net(width=5)
    with pytest.raises(CheckpointError, match=r"of another model.*weight \(4, 3\) instead of \(5"):
        load_sharded(tmp_path, 1, Trained(wider, its_optimizer))
    with pytest.raises(CheckpointError, match=r"it lacks 0\.bias, 0\.weight; only it has bias"):
        load_sharded(tmp_path, 1, Trained(nn.Sequential(model), None))
    with pytest.raises(CheckpointError, match="another optimizer; given: SGD; expected: AdamW"):
        load_sharded(tmp_path, 1, Trained(model, torch.optim.AdamW(model.parameters())))
    manifest = tmp_path / checkpoint_folder(1) / MANIFEST_NAME
    manifest.write_bytes(manifest.read_bytes().replace(PIECES_FORMAT.encode(), b"other"))
    with pytest.raises(CheckpointMissing, match="not a sharded one"):
        load_sharded(tmp_path, 1, Trained(model, optimizer))


def test_overlapping_pieces_do_not_fill_a_tensor() -> None:
    places = [[0, 0], [0, 2], [0, 2], [2, 2]]
    parts = [
        Part(f"{n}", {"v": torch.ones(2, 2)}, {PIECES: json.dumps({"v": [place, [4, 4]]})})
        for n, place in enumerate(places)
    ]
    with pytest.raises(CheckpointCorrupt, match="pieces overlap"):
        Pieces.of_parts(parts)
    parts[2] = Part("2", parts[2].tensors, {PIECES: json.dumps({"v": [[2, 0], [4, 4]]})})
    assert Pieces.of_parts(parts).cuts["v"].whole().tolist() == [[1.0] * 4] * 4


def test_a_failed_write_releases_its_tensors(tmp_path: Path) -> None:
    writer = PieceWriter(copy=True)
    with alone_quietly():
        save({"v": torch.ones(3)}, storage_writer=writer, no_dist=True)
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        writer.write(tmp_path / "file" / "below", {})
    writer.write(tmp_path / "other", {})
    assert Pieces([tmp_path / "other"]).cuts == {}


def test_optimizer_of_something_else_is_not_saved(tmp_path: Path) -> None:
    (model, _), (_, optimizer) = net(), net()
    with pytest.raises(CheckpointError, match="trains a tensor that is not in the model"):
        save_sharded(tmp_path, 1, Trained(model, optimizer), ShardedInfo(1))


@pytest.mark.parametrize(
    ("places", "why"),
    [
        (None, "not a part of a sharded"),
        ('{"a": [[1], [2]]}', "outside of its tensor"),
        ('{"a": [[0], [3]]}', "2 of"),
        ('{"a": [[-1], [2]]}', "outside of its tensor"),
        ('{"b": [[0], [2]]}', "not a part of a sharded"),
        ('{"a": [[0, 0], [2]]}', "not a part of a sharded"),
    ],
)
def test_files_with_impossible_pieces_are_refused(
    tmp_path: Path, places: str | None, why: str
) -> None:
    path = tmp_path / "rank-00000.safetensors"
    save_file({"a": torch.zeros(2)}, path, metadata={PIECES: places} if places else None)
    with pytest.raises(CheckpointCorrupt, match=why):
        Pieces([path])
