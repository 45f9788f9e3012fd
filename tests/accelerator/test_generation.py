"""`atoll generate` computes on the accelerator, or where it is told to."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from atoll.checkpoint import save_weights
from atoll.checkpoint.format.weights import describe
from atoll.cli.commands.generate import generate
from atoll.errors import ConfigError
from tests.accelerator.noted import computing, on_processor
from tests.accelerator.pretended import RECORD
from tests.rl.text.small import WORDING, gpt


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a trained model's file."""
    model, path = gpt(), tmp_path / "model.safetensors"
    about = describe(
        "gpt", options=dataclasses.asdict(model.config), tokenizer=WORDING.tokenizer.to_json()
    )
    save_weights(path, model.state_dict(), about=about)
    return path


def test_text_is_written_where_the_accelerator_is(
    file: Path, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    with on_processor() as found:
        generate(file, prompt="a(", tokens=8, temperature=0.8, seed=1)
    assert RECORD.ran("mm") + RECORD.ran("addmm") > 0
    assert not {name for name in computing(found) if name in ("mm", "addmm", "embedding")}
    there = capsys.readouterr().out
    RECORD.clear()
    generate(file, prompt="a(", tokens=8, temperature=0.8, seed=1, device="cpu")
    assert not RECORD.operators
    assert capsys.readouterr().out == there


def test_a_missing_device_is_said(file: Path, device: torch.device) -> None:
    with pytest.raises(ConfigError, match="no such accelerator"):
        generate(file, device="cuda:3", seed=1)
