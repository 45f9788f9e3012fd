"""A pretrained model is fine-tuned by adapters: only these travel and are saved."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import atoll
from atoll.checkpoint import DirectoryStore, load_weights
from atoll.checkpoint.format.part import SHARED
from atoll.checkpoint.format.weights import plain_names
from atoll.config import JobSpec, dump_spec, parse_spec, read_spec
from atoll.data import ExampleSet
from atoll.data.tuning.packing import IGNORED
from atoll.errors import CheckpointError, ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.models.adapted import TunedLM
from atoll.run import Run
from atoll.run.place import Membership
from atoll.train.build import build
from atoll.train.results.sample import load_model
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered
from tests.models.tiny import count_chats, save_tiny
from tests.train.members import train_member

transformers = pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
peft = pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return count_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


def spec_of(pretrained: Path, chats: Path, **tune: Any) -> JobSpec:
    return read_spec(
        {
            "job": {"nodes": 2, "threads": 1},
            "model": {"source": str(pretrained), "context": 64},
            "tune": {"data": [str(chats)], "rank": 4, **tune},
            "data": {"held_out": 0.1},
            "train": {"steps": 8, "batch": 4, "lr": 0.01, "warmup": 1, "weight_decay": 0.0},
            "strategy": {"preset": "local-sgd", "every": 2},
            "checkpoint": {"every": 1, "keep": 9},
        }
    )


@pytest.fixture
def spec(pretrained: Path, chats: Path) -> JobSpec:
    return spec_of(pretrained, chats)


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members that are threads load their weights in turn: the library has global switches."""
    lock, prepare = threading.Lock(), Trainer.prepare

    def in_turn(self: Trainer, start: Registered) -> None:
        with lock:
            prepare(self, start)

    monkeypatch.setattr(Trainer, "prepare", in_turn)


def train(
    spec: JobSpec, folder: Path, *, groups: MemoryGroups | None = None, **more: Any
) -> list[dict[str, Any]]:
    groups = groups or MemoryGroups(2)
    for group in groups:
        (folder / group.me).mkdir(parents=True, exist_ok=True)
    return groups.together(lambda group: train_member(spec, group, folder / group.me, **more))


def test_members_train_one_set_of_adapters(spec: JobSpec, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", job="j")
    first, second = train(spec, tmp_path, store=store)
    assert first["digest"] == second["digest"]
    assert first["loss_final"] < 0.95 * first["first_loss_sum"] / first["first_tokens"]

    # What each sent: 4 rounds of fp32 adapters, and the comparison of the start.
    built = build(spec, member="w0", slot=0, num_slots=2)
    trained = sum(p.numel() for p in built.model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in built.model.parameters())
    assert built.task.num_parameters == trained < whole / 2
    assert first["sent_bytes"] < 1.1 * 4 * 4 * trained

    # What was saved: adapters, in the checkpoint and in the result.
    part = store.get(store.latest(), names={SHARED})[SHARED]
    saved = {name for name in plain_names(part.tensors) if name.startswith("model.layers")}
    result = load_weights(tmp_path / "w0" / "model.safetensors").state
    assert saved == set(result)
    assert all("lora_" in name for name in saved)
    assert sum(tensor.numel() for tensor in result.values()) == trained


def test_resumed_tuning_equals_uninterrupted_tuning(spec: JobSpec, tmp_path: Path) -> None:
    whole = train(spec, tmp_path / "whole")
    store = DirectoryStore(tmp_path / "store", job="j")
    train(spec, tmp_path / "half", store=store)
    middle = 3  # of the first comparison and four rounds of two steps
    resumed = MemoryGroups(2, start_round=middle)
    again = train(spec, tmp_path / "again", groups=resumed, store=store, resume_round=middle)
    assert [one["digest"] for one in again] == [one["digest"] for one in whole]
    assert again[0]["loss_final"] == whole[0]["loss_final"]


def test_adapters_of_another_base_are_refused(spec: JobSpec, chats: Path, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store", job="j")
    train(spec, tmp_path / "one", store=store)
    other = save_tiny(tmp_path / "other")
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    model.save_pretrained(other)
    groups = MemoryGroups(2, start_round=store.latest())
    with pytest.raises(CheckpointError, match="another base model"):
        train(
            spec_of(other, chats), tmp_path / "two", groups=groups, store=store,
            resume_round=store.latest(),
        )  # fmt: skip


def test_result_is_loaded_into_base_and_adapters(spec: JobSpec, tmp_path: Path) -> None:
    train(spec, tmp_path)
    model, tokenizer = load_model(tmp_path / "w0" / "model.safetensors")
    assert isinstance(model, TunedLM)
    ids = tokenizer.encode(b"count 3 apples").long()[None]
    started = build(spec, member="w0", slot=0, num_slots=2).model
    assert not torch.equal(model(ids), started(ids))
    state = dict(load_weights(tmp_path / "w0" / "model.safetensors").state)
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="missing"):
        model.load_adapters(state)


def test_packed_examples_have_the_loss_they_have_alone(pretrained: Path, chats: Path) -> None:
    packed, alone = (
        build(spec_of(pretrained, chats, pack=pack), member="w0", slot=0, num_slots=1)
        for pack in (True, False)
    )

    def losses(built: Any) -> Iterator[tuple[float, int]]:
        dataset = built.dataset
        assert isinstance(dataset, ExampleSet)
        for inputs, targets in dataset.batches(batch=4):
            counted = int((targets != IGNORED).sum())
            yield float(built.model.loss(inputs, targets).detach()) * counted, counted

    both = [[sum(column) for column in zip(*losses(one), strict=True)] for one in (packed, alone)]
    assert len(packed.dataset.train) < len(alone.dataset.train)
    assert both[0][1] == both[1][1]
    assert both[0][0] == pytest.approx(both[1][0], rel=1e-5)


@pytest.mark.parametrize("method", ["dora", "full"])
def test_other_methods_train_what_they_should(
    pretrained: Path, chats: Path, tmp_path: Path, method: str
) -> None:
    spec = spec_of(pretrained, chats, method=method)
    first, second = train(spec, tmp_path)
    assert first["digest"] == second["digest"]
    names = set(load_weights(tmp_path / "w0" / "model.safetensors").state)
    whole = build(spec, member="w0", slot=0, num_slots=1).model
    assert any("magnitude" in name for name in names) == (method == "dora")
    assert (names == set(whole.state_dict())) == (method == "full")
    load_model(tmp_path / "w0" / "model.safetensors")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # used by peft
def test_a_model_of_peft_in_a_script_sends_and_saves_adapters(
    pretrained: Path, tmp_path: Path
) -> None:
    lock, sizes = threading.Lock(), dict[str, int]()

    def body(group: Group) -> Tensor:
        with lock:
            torch.manual_seed(1)
            base = transformers.AutoModelForCausalLM.from_pretrained(pretrained)
            model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        with Run(group, Membership(tmp_path, slot=int(group.me[1:]), num_slots=2)) as run:
            inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
            optimizer = run.wrap(model, inner, outer=atoll.DiLoCo(every=2), codec="int8")
            for step in range(4):
                optimizer.zero_grad()
                ids = torch.arange(8)[None] + step + 10 * run.slot
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
            task: Any = getattr(optimizer, "task")  # noqa: B009 - not of the public type
        from atoll.checkpoint import Extras, OuterState, collect

        shared = collect(task, OuterState(), Extras())[1]
        sizes[group.me] = sum(t.numel() for n, t in shared.tensors.items() if "layers" in n)
        return torch.cat([p.detach().flatten() for p in inner.param_groups[0]["params"]])

    first, second = MemoryGroups(2).together(body)
    assert torch.equal(first, second)
    assert sizes == {"w0": len(first), "w1": len(first)}


def test_table_survives_the_job_file(spec: JobSpec) -> None:
    assert parse_spec(dump_spec(spec)) == spec
    assert spec.tune.method == "lora"
    assert spec.model.name == "transformers"
    assert dump_spec(read_spec({})).count("[tune]") == 0


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"tune": {"method": "lora"}}, "nothing to fine-tune on"),
        ({"tune": {"data": ["a.jsonl"], "weights": [1.0, 2.0]}}, "needs a weight"),
        ({"tune": {"data": ["a.jsonl"], "method": "lorra"}}, "lora"),
        (
            {
                "tune": {"data": ["a.jsonl"]},
                "strategy": {"inner": "fsdp"},
                "island": {"ranks": 2},
            },
            "in one process",
        ),
        ({"tune": {"data": ["a.jsonl"]}, "job": {"script": "a.py"}}, "built-in trainer"),
        ({"data": {"corpus": "examples"}}, "not named"),
    ],
)
def test_wrong_tables_are_refused(tables: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_spec(tables)


def test_unknown_layers_are_refused(pretrained: Path, chats: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapters cannot be put.*nothing_proj"):
        build(
            spec_of(pretrained, chats, targets=["nothing_proj"]), member="w0", slot=0, num_slots=1
        )


def test_one_member_trains_as_a_plain_loop(spec: JobSpec, tmp_path: Path) -> None:
    (tmp_path / "w0").mkdir()
    alone = train_member(spec, SingleGroup(), tmp_path / "w0")
    again = train_member(spec, SingleGroup(), tmp_path / "w0")
    assert alone["digest"] == again["digest"]
