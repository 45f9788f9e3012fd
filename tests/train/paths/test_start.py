"""Paths that begin with the weights of a plain model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import describe, save_weights
from atoll.errors import CheckpointMissing, ConfigError
from atoll.models import GPT, GPTConfig
from atoll.train.paths.start import begin_from
from tests.train.paths.kit import job_of, run_paths, same


def test_all_paths_begin_with_the_given_weights(tmp_path: Path) -> None:
    spec = job_of(tmp_path, [1, 1], nodes=1)
    file = tmp_path / "first" / "w0" / "path-0000.safetensors"
    first = run_paths(spec, tmp_path / "first", members=1).weights[0]
    spec = job_of(tmp_path, [2, 2], nodes=2, steps=3, more=f'start = "{file}"')
    still = replace(spec, train=replace(spec.train, lr=1e-12))
    found = run_paths(still, tmp_path / "second", members=2).weights
    for weights in found.values():
        assert all(torch.allclose(weights[name], first[name], atol=1e-7) for name in first)
    moved = run_paths(spec, tmp_path / "third", members=2).weights
    assert not any(same(weights, first) for weights in moved.values())


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointMissing):
        begin_from(str(file), GPT(GPTConfig(width=16, tie=False)))
    about = describe("gpt", options={"width": 16}, tokenizer="bytes")
    save_weights(file, GPT(GPTConfig(width=16, tie=False)).state_dict(), about=about)
    with pytest.raises(ConfigError, match="of another model"):
        begin_from(str(file), GPT(GPTConfig(width=32, tie=False)))
