"""Runs as they are collected, made by members that are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.config import dump_tables, read_spec
from atoll.group.single import SingleGroup
from tests.models.tiny import count_chats, save_tiny
from tests.train.members import train_member

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return count_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


def trained_run(folder: Path, tables: dict[str, Any]) -> Path:
    """Train alone and leave a folder as `runs/JOB` is: job.toml and model.safetensors."""
    spec = read_spec(tables)
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(dump_tables(tables), encoding="utf-8")
    train_member(spec, SingleGroup(), folder)
    return folder


def tune_tables(pretrained: Path, chats: Path, *, method: str) -> dict[str, Any]:
    return {
        "job": {"nodes": 1, "threads": 1},
        "model": {"name": "transformers", "source": str(pretrained), "context": 64},
        "tune": {"data": [str(chats)], "rank": 4, "method": method},
        "data": {"held_out": 0.1},
        "train": {"steps": 6, "batch": 4, "lr": 0.02, "warmup": 1, "weight_decay": 0.0},
        "strategy": {"preset": "local-sgd", "every": 2},
    }


@pytest.fixture(scope="session", params=["lora", "dora", "full"])
def tuned(
    request: pytest.FixtureRequest,
    pretrained: Path,
    chats: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A run of each method."""
    folder = tmp_path_factory.mktemp(request.param) / "tune-tiny"
    return trained_run(folder, tune_tables(pretrained, chats, method=request.param))


@pytest.fixture(scope="session")
def lora(pretrained: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "tune-tiny"
    return trained_run(folder, tune_tables(pretrained, chats, method="lora"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of Atoll's own Llama on bytes."""
    place = tmp_path_factory.mktemp("llama")
    (place / "text.txt").write_text("the users and the machines " * 400, encoding="utf-8")
    tables: dict[str, Any] = {
        "job": {"nodes": 1, "threads": 1},
        "model": {"name": "llama", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2,
                  "context": 32, "tie": False},
        "data": {"corpus": f"files:{place}/*.txt"},
        "train": {"steps": 4, "batch": 4, "lr": 0.01, "warmup": 1, "eval_tokens": 256},
        "strategy": {"preset": "local-sgd", "every": 2},
    }  # fmt: skip
    return trained_run(place / "own-llama", tables)
