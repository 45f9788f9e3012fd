"""`atoll tune` as a command, from the examples to what the tuned model says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.checkpoint import load_weights
from tests.e2e.conftest import Atoll
from tests.models.tiny import docstring_chats, save_tiny
from tests.patience import PATIENCE_S

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docstring_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.mark.e2e
def test_two_members_tune_and_the_model_is_exported(
    atoll: Atoll, pretrained: Path, chats: Path
) -> None:
    checked = atoll.run_here("tune", str(pretrained), str(chats), "--check", "--context", "128")
    assert checked.code == 0, checked.both
    assert "rows to train on" in checked.out
    assert "[tune]" in checked.out
    words = ["--context", "128", "--batch", "2", "--steps", "8", "--lr", "0.01"]
    words += ["--set", "strategy.every=4", "--set", "tune.rank=4"]
    done = atoll.run(
        "tune", str(pretrained), str(chats), "--local", "2", *words, timeout_s=3 * PATIENCE_S
    )
    assert done.code == 0, done.both
    assert "atoll chat" in done.out
    folder = atoll.job_folder()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["replicas_identical"] is True
    assert summary["loss_final"] < 0.99 * summary["loss_first"]
    assert all("lora_" in name for name in load_weights(folder / "model.safetensors").state)
    whole = sum(p.stat().st_size for p in pretrained.glob("*.safetensors"))
    assert (folder / "model.safetensors").stat().st_size < whole

    out = atoll.run_here("export", folder.name, "tuned")
    assert out.code == 0, out.both
    assert (atoll.folder / "tuned" / "config.json").is_file()
    said = atoll.run_here("chat", folder.name, "-m", "What is `json.dumps`?", "-n", "8")
    assert said.code == 0, said.both
    score = atoll.run_here("evaluate", folder.name, str(chats), "--json")
    assert score.code == 0, score.both
    assert json.loads(score.out)["loss"] < summary["loss_first"]
