from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.checkpoint import DirectoryStore, load_weights
from atoll.checkpoint.format.part import SHARED, member_part
from atoll.checkpoint.format.weights import MODEL_PREFIX
from atoll.config import JobSpec, read_spec
from atoll.errors import LossNotFinite, OutOfMemory, StorageFull
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.train.batches import MemberStream
from atoll.train.out_of_memory import memory_errors
from atoll.train.results.sample import load_model, write_text
from atoll.train.trainer import Trainer
from atoll.wire.messages import Event, Point, Registered
from tests.train.members import train_member


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        lines = [
            f"def f{number}_{line}(x):\n    return x * {line} + {number}\n" for line in range(200)
        ]
        (folder / f"{number}.py").write_text("".join(lines), encoding="utf-8")
    return f"files:{folder}/*.py"


@pytest.fixture(autouse=True)
def _one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let members that are threads draw their weights in turn: torch's generator is global."""
    lock, prepare = threading.Lock(), Trainer.prepare

    def in_turn(self: Trainer, start: Registered) -> None:
        with lock:
            prepare(self, start)

    monkeypatch.setattr(Trainer, "prepare", in_turn)


def make_spec(corpus: str, **tables: dict[str, Any]) -> JobSpec:
    small = {"layers": 1, "width": 16, "heads": 2, "context": 16}
    base: dict[str, dict[str, Any]] = {
        "job": {"nodes": 2, "threads": 0},
        "model": small,
        "data": {"corpus": corpus},
        "train": {"steps": 12, "batch": 4, "lr": 0.01, "warmup": 2, "eval_tokens": 512},
        "strategy": {"preset": "diloco", "codec": "feedback(int8)", "every": 3, "shared_steps": 2},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return read_spec(base)


def train_members(
    spec: JobSpec, folder: Path, *, groups: MemoryGroups | None = None, **settings: Any
) -> list[dict[str, Any]]:
    table = groups or MemoryGroups(spec.job.nodes)

    def body(group: Group) -> dict[str, Any]:
        return train_member(spec, group, folder / group.me, **settings)

    for group in table:
        (folder / group.me).mkdir(parents=True, exist_ok=True)
    return table.together(body)


def weights(folder: Path) -> dict[str, Tensor]:
    return load_weights(folder / "w0" / "model.safetensors").state


def test_members_train_one_model(corpus: str, tmp_path: Path) -> None:
    results = train_members(make_spec(corpus), tmp_path)
    first, second = results
    assert first["digest"] == second["digest"]
    assert first["digests"] == second["digests"]
    assert first["steps"] == second["steps"] == 12
    assert first["tokens"] == 12 * 4 * 16
    assert first["sent_bytes"] > 0
    assert first["loss_final"] < first["first_loss_sum"] / first["first_tokens"]
    assert "loss_final" not in second
    assert first["sample"].startswith("def ")
    assert not (tmp_path / "w1" / "model.safetensors").exists()
    assert json.loads((tmp_path / "w0" / "result.json").read_text()) == first


@pytest.mark.parametrize(
    "strategy",
    [
        {"preset": "diloco", "codec": "feedback(int8)", "every": 3, "shared_steps": 2},
        {"preset": "local-sgd", "every": 3},
        {"preset": "ddp"},
        {"preset": "alone", "every": 3},
        {"preset": "async-diloco", "every": 2, "anchor_every": 4},
        {"preset": "parameter-server", "anchor_every": 3},
        {"preset": "stale-synchronous", "anchor_every": 3},
        {"preset": "diloco", "every": 2, "shared_steps": 0, "drop": 0.4},
        {"preset": "streaming-diloco", "every": 6, "fragments": 2, "delay": 2, "shared_steps": 1},
        {"preset": "eager-diloco", "every": 3, "shared_steps": 1},
        {"preset": "slowmo", "every": 3},
    ],
    ids=lambda table: str(table["preset"]) + "-lost" * ("drop" in table),
)
@pytest.mark.every(3)
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(
    corpus: str, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    spec = replace(make_spec(corpus), strategy=read_spec({"strategy": strategy}).strategy)
    whole = train_members(spec, tmp_path / "whole")
    store = DirectoryStore(tmp_path / "halves", job="j")
    groups = MemoryGroups(2)

    def stop_in_mid_run(point: Point) -> None:
        if point.round >= 2:
            groups.stop()

    cut = train_members(
        spec, tmp_path / "halves", groups=groups, store=store, report=stop_in_mid_run
    )
    assert cut[0]["stopped"]
    assert 0 < cut[0]["steps"] < 12
    resumed = MemoryGroups(2, start_round=store.latest())
    rest = train_members(
        spec, tmp_path / "halves", groups=resumed, store=store, resume_round=store.latest()
    )
    assert [one["digest"] for one in rest] == [one["digest"] for one in whole]
    assert rest[0]["digests"] == whole[0]["digests"]
    assert rest[0]["tokens"] == whole[0]["tokens"]
    assert rest[0]["first_loss_sum"] == whole[0]["first_loss_sum"]
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "halves")[name])


@pytest.mark.parametrize(
    "table",
    [
        {"preset": "streaming-diloco", "every": 4, "fragments": 2},
        {"preset": "eager-diloco", "every": 4},
    ],
    ids=["streaming", "eager"],
)
def test_checkpoint_holds_common_and_member_state(
    corpus: str, tmp_path: Path, table: dict[str, Any]
) -> None:
    spec = replace(make_spec(corpus), strategy=read_spec({"strategy": table}).strategy)
    store, groups = DirectoryStore(tmp_path, job="j"), MemoryGroups(2)

    def stop_in_mid_run(point: Point) -> None:
        if point.round >= 2:
            groups.stop()

    train_members(spec, tmp_path, groups=groups, store=store, report=stop_in_mid_run)
    names = [SHARED, member_part("w0"), member_part("w1")]
    parts = store.get(store.latest(), names=set(names))
    shared, *own = (
        {k: v for k, v in parts[name].tensors.items() if k.startswith(MODEL_PREFIX)}
        for name in names
    )
    kept = weights(tmp_path)
    assert all(torch.equal(shared[MODEL_PREFIX + name], kept[name]) for name in kept)
    for carried in own:
        assert carried.keys() == shared.keys()
        assert any(not torch.equal(carried[name], shared[name]) for name in shared)


def test_alone_needs_no_hub_and_a_stop_keeps_what_was_trained(corpus: str, tmp_path: Path) -> None:
    spec = make_spec(corpus, job={"nodes": 1}, strategy={"shared_steps": 0})
    store = DirectoryStore(tmp_path, job="j")
    stops = iter([False] * 7 + [True])
    cut = train_member(spec, SingleGroup(), tmp_path, store=store, should_stop=lambda: next(stops))
    assert (cut["stopped"], cut["steps"]) == (True, 7)
    assert store.manifest(store.latest()).step == 7  # and not 6, where the last round was saved
    rest = train_member(
        spec,
        SingleGroup(committed_round=store.latest()),
        tmp_path,
        store=store,
        resume_round=store.latest(),
    )
    whole = train_member(spec, SingleGroup(), tmp_path / "whole")
    assert rest["digest"] == whole["digest"]


def test_a_member_that_leaves_between_rounds_gives_no_model(corpus: str, tmp_path: Path) -> None:
    spec = make_spec(corpus, strategy={"shared_steps": 0})
    groups = MemoryGroups(2)
    published: list[str] = []

    def body(group: Group) -> dict[str, Any]:
        stops = iter([False] * 4 + [True])
        result = train_member(
            spec,
            group,
            tmp_path / group.me,
            publish=lambda path, name: published.append(group.me),
            should_stop=lambda: group.me == "w0" and next(stops),
        )
        group.close()
        return result

    left, stayed = groups.together(body)
    assert (left["stopped"], left["steps"]) == (True, 4)
    assert (stayed["stopped"], stayed["steps"]) == (False, 12)
    assert published == ["w1"]


def test_points_tell_parameters_progress_and_evaluation_shares(corpus: str, tmp_path: Path) -> None:
    points: dict[str, list[Point]] = {"w0": [], "w1": []}

    def body(group: Group) -> dict[str, Any]:
        return train_member(
            make_spec(corpus), group, tmp_path / group.me, report=points[group.me].append
        )

    MemoryGroups(2).together(body)
    assert points["w0"][0].values["parameters"] > 0
    names = {name for point in points["w0"] for name in point.values}
    assert {"loss", "tokens_per_s", "lr", "wall_s", "compute_s", "held_out_loss"} <= names
    shares = [
        sum(p.values.get("held_out_tokens", 0) for p in points[m] if p.step == 0) for m in points
    ]
    assert sum(shares) == 512
    lines = (tmp_path / "w0" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(points["w0"])
    assert json.loads(lines[0])["member"] == "w0"


def test_a_loss_that_is_not_finite_names_member_and_step(corpus: str, tmp_path: Path) -> None:
    spec = make_spec(corpus, job={"nodes": 1}, train={"lr": 1e30, "clip": 0.0, "warmup": 0})
    with pytest.raises(LossNotFinite, match=r"member w0, step \d+") as caught:
        train_member(spec, SingleGroup(), tmp_path)
    assert "update was refused" in str(caught.value)


def test_a_full_disk_is_reported_and_training_goes_on(corpus: str, tmp_path: Path) -> None:
    class FullStore(DirectoryStore):
        def put(self, *args: Any, **named: Any) -> bool:
            raise StorageFull("no room left", given="test")

    events: list[Event] = []
    result = train_member(
        make_spec(corpus, job={"nodes": 1}),
        SingleGroup(),
        tmp_path,
        store=FullStore(tmp_path),
        announce=events.append,
    )
    assert result["steps"] == 12
    assert events[0].kind == "checkpoint-failed"


def test_the_trained_model_can_be_loaded_and_writes(corpus: str, tmp_path: Path) -> None:
    train_member(make_spec(corpus, job={"nodes": 1}), SingleGroup(), tmp_path)
    model, tokenizer = load_model(tmp_path / "model.safetensors")
    once = write_text(model, tokenizer, "def ", tokens=20, seed=3)
    assert once.startswith("def ")
    assert once == write_text(model, tokenizer, "def ", tokens=20, seed=3)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")],
)
def test_running_out_of_memory_says_so(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(OutOfMemory, match="member w3"), memory_errors(member="w3"):
        fail()


def test_members_share_the_first_batches_and_then_part() -> None:
    from atoll.data import Shards

    shards = Shards(torch.arange(20_000) % 251, slots=2, context=8, seed=1)
    make: Callable[..., MemberStream] = lambda slot, **more: MemberStream(  # noqa: E731
        shards, slot=slot, batch=2, shared_steps=3, **more
    )
    first, second = make(0), make(1)
    pairs = [(next(first)[0], next(second)[0]) for _ in range(5)]
    assert [torch.equal(a, b) for a, b in pairs] == [True, True, True, False, False]
    resumed = make(1)
    for _ in range(2):
        next(resumed)
    again = make(1, step=2, cursor=resumed.cursor)
    for expected in pairs[2:]:
        assert torch.equal(next(again)[0], expected[1])


def test_a_stream_goes_where_the_group_sends_it() -> None:
    from atoll.data import Shards

    shards = Shards(torch.arange(20_000) % 251, slots=3, context=8, seed=1)
    make: Callable[..., MemberStream] = lambda slot, **more: MemberStream(  # noqa: E731
        shards, slot=slot, batch=2, shared_steps=3, **more
    )
    other = make(2, step=3)
    for _ in range(4):
        next(other)
    expected = other.place()
    assert expected is not None
    late = make(1)
    assert late.place() is None  # it reads along in the first slot
    late.rejoin(3)
    assert late.place() == (1, {"slot": 1, "data_pass": 0, "offset": 0})
    late.move(*expected)
    assert late.place() == expected
    assert torch.equal(next(late)[0], next(other)[0])
    late.move(1, {})
    assert late.place() == (1, {"slot": 1, "data_pass": 0, "offset": 0})


def test_a_stream_knows_where_it_will_be() -> None:
    from atoll.data import Shards

    shards = Shards(torch.arange(2_000) % 251, slots=3, context=8, seed=1)
    stream = MemberStream(shards, slot=1, batch=32, shared_steps=2)
    next(stream)
    assert stream.place_after(5) is None, "all still read the first slot"
    next(stream)
    for steps in (0, 1, 3, 9):  # beyond the end of a pass, too
        expected = stream.place_after(steps)
        for _ in range(steps):
            next(stream)
        assert stream.place() == expected
    assert stream.cursor.data_pass > 1


def test_utilisation_is_what_training_cost_alone(corpus: str, tmp_path: Path) -> None:
    result = train_members(make_spec(corpus), tmp_path)[0]
    assert 0 < result["compute_s"] <= result["wall_s"]
    assert result["sync_s"] > 0
    assert math.isclose(result["tokens_per_s"], result["tokens"] / result["wall_s"], rel_tol=1e-9)
