"""model.safetensors: plain names, and all that rebuilds the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.checkpoint import DirectoryStore, Part, SavePoint, describe, load_weights, save_weights
from atoll.errors import CheckpointCorrupt, CheckpointMissing

ABOUT = describe("gpt", options={"layers": 2, "tie": True}, tokenizer='{"name": "bytes"}')


def tied_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def test_weights_come_back_with_what_rebuilds_the_model(tmp_path: Path) -> None:
    model = tied_model()
    path = tmp_path / "model.safetensors"
    sha256 = save_weights(path, model.state_dict(), about={**ABOUT, "round": "12"})
    weights = load_weights(path)
    assert (weights.model, weights.options) == ("gpt", {"layers": 2, "tie": True})
    assert weights.tokenizer == '{"name": "bytes"}'
    assert weights.metadata == {"round": "12"}
    other = tied_model()
    other.load_state_dict(weights.state)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    assert set(load_file(path)) == set(model.state_dict())
    assert len(sha256) == 64


def test_shared_part_of_a_checkpoint_serves_as_weights(tmp_path: Path) -> None:
    part = Part(
        "shared.safetensors",
        {"model/a": torch.ones(2), "common/outer/shared.momentum": torch.zeros(2)},
        ABOUT,
    )
    own = Part("w0.safetensors", {})
    DirectoryStore(tmp_path).put(SavePoint(3, 1, "w0", ["w0"]), [part, own])
    weights = load_weights(tmp_path / "checkpoints/round-000003/shared.safetensors")
    assert list(weights.state) == ["a"]
    assert weights.model == "gpt"


def test_absent_file_and_foreign_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="no weights"):
        load_weights(tmp_path / "model.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "foreign.safetensors")
    with pytest.raises(CheckpointCorrupt, match="does not say which model"):
        load_weights(tmp_path / "foreign.safetensors")
