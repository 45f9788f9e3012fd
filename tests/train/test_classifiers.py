"""The built-in trainer trains classifiers as it trains language models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.checkpoint import DirectoryStore, load_weights
from atoll.config import JobSpec, read_spec
from atoll.data import load_images
from atoll.errors import ConfigError
from atoll.group.in_process.groups import MemoryGroups
from atoll.models import build_model
from atoll.train.build import build
from atoll.train.evaluate import evaluate
from atoll.train.results.sample import load_model
from atoll.train.trainer import Trainer
from atoll.wire.messages import Point, Registered
from tests.train.members import train_member

RESNET = {"name": "resnet", "blocks": 1, "width": 8}


def make_spec(**tables: dict[str, Any]) -> JobSpec:
    base: dict[str, dict[str, Any]] = {
        "job": {"nodes": 2, "threads": 1},
        "model": RESNET,
        "data": {"corpus": "segments"},
        "train": {"steps": 40, "batch": 64, "lr": 0.02, "warmup": 4, "eval_tokens": 256},
        "strategy": {"preset": "local-sgd", "every": 2},
    }
    return read_spec({name: table | tables.get(name, {}) for name, table in base.items()})


def train(
    spec: JobSpec, groups: MemoryGroups, folder: Path, **settings: Any
) -> list[dict[str, Any]]:
    for group in groups:
        (folder / group.me).mkdir(parents=True, exist_ok=True)
    return groups.together(lambda group: train_member(spec, group, folder / group.me, **settings))


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members that are threads draw their weights in turn: torch's generator is global."""
    lock, prepare = threading.Lock(), Trainer.prepare

    def in_turn(self: Trainer, start: Registered) -> None:
        with lock:
            prepare(self, start)

    monkeypatch.setattr(Trainer, "prepare", in_turn)


def test_two_members_train_one_classifier(tmp_path: Path) -> None:
    first, second = train(make_spec(), MemoryGroups(2), tmp_path)
    assert first["digest"] == second["digest"]
    assert first["data_digest"] == load_images("segments").digest
    assert first["tokens"] == 40 * 64
    assert first["loss_final"] < 0.9 * first["first_loss_sum"] / first["first_tokens"]
    assert first["accuracy"] > 0.2  # guessing: 0.1
    assert "sample" not in first
    assert "bytes_per_token" not in first


def test_final_accuracy_is_that_of_the_published_weights(tmp_path: Path) -> None:
    first, _ = train(make_spec(train={"steps": 10}), MemoryGroups(2), tmp_path)
    weights = load_weights(tmp_path / "w0" / "model.safetensors")
    model = build_model(weights.model, **weights.options)
    model.load_state_dict(weights.state)
    model.eval()
    images, classes = load_images("segments").held_out.batch(torch.arange(1024))
    right = (model(images).argmax(dim=-1) == classes).float().mean().item()
    assert first["accuracy"] == pytest.approx(right, abs=2e-3)


def test_batch_norm_means_are_equal_on_all_members(tmp_path: Path) -> None:
    spec = make_spec(model={"norm": "batch"}, train={"steps": 10})
    first, second = train(spec, MemoryGroups(2), tmp_path)
    assert first["digest"] == second["digest"]
    state = load_weights(tmp_path / "w0" / "model.safetensors").state
    assert state["stem.norm.running_mean"].abs().sum() > 0


def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    spec = make_spec(train={"steps": 12}, strategy={"every": 3})
    whole = train(spec, MemoryGroups(2), tmp_path / "whole")
    store, groups = DirectoryStore(tmp_path / "halves", job="j"), MemoryGroups(2)

    def stop_in_mid_run(point: Point) -> None:
        if point.round >= 2:
            groups.stop()

    cut = train(spec, groups, tmp_path / "halves", store=store, report=stop_in_mid_run)
    assert 0 < cut[0]["steps"] < 12
    round_ = store.latest()
    resumed = MemoryGroups(2, start_round=round_)
    rest = train(spec, resumed, tmp_path / "halves", store=store, resume_round=round_)
    assert [one["digest"] for one in rest] == [one["digest"] for one in whole]
    assert rest[0]["accuracy"] == whole[0]["accuracy"]


def test_shares_of_an_evaluation_add_up() -> None:
    built = build(make_spec(), member="w0", slot=0, num_slots=2)
    whole = evaluate(built.model, built.held_out)
    parts = [evaluate(built.model, built.held_out, share=n, shares=3) for n in range(3)]
    assert sum(part.tokens for part in parts) == whole.tokens == 1024
    assert sum(part.correct or 0 for part in parts) == whole.correct
    assert sum(part.loss_sum for part in parts) == pytest.approx(whole.loss_sum)


def test_loss_computed_elsewhere_gives_no_accuracy() -> None:
    built = build(make_spec(), member="w0", slot=0, num_slots=1)
    found = evaluate(built.model, built.held_out, loss_of=lambda x, _: x.new_tensor(2.0))
    assert (found.loss, found.accuracy) == (2.0, None)


@pytest.mark.parametrize(
    ("model", "corpus", "fitting"),
    [("gpt", "segments", "resnet, vit"), ("vit", "stdlib", "gpt, gpt2, llama")],
)
def test_model_for_other_data_is_refused_with_those_that_fit(
    model: str, corpus: str, fitting: str
) -> None:
    spec = read_spec({"model": {"name": model}, "data": {"corpus": corpus}})
    with pytest.raises(ConfigError, match=f"cannot be trained on these data.*{fitting}"):
        build(spec, member="w0", slot=0, num_slots=1)


def test_classifier_is_no_writer(tmp_path: Path) -> None:
    train(make_spec(train={"steps": 2}), MemoryGroups(2), tmp_path)
    with pytest.raises(ConfigError, match=r"writes no text.*resnet, which takes images"):
        load_model(tmp_path / "w0" / "model.safetensors")
