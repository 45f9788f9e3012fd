"""The built-in trainer on an accelerator: every model, every method, and mixed groups."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.checkpoint import DirectoryStore
from atoll.checkpoint.format.memory_image import MemoryImage, part_of
from atoll.checkpoint.state.capture import random_state, set_random_state
from atoll.codec import make_codec
from atoll.config import JobSpec, read_spec
from atoll.devices.choose import choose, count, why_idle
from atoll.devices.facts import check_dtypes, facts, name_of
from atoll.devices.transfer import placed
from atoll.errors import ConfigError
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup
from atoll.methods.table import PRESETS
from atoll.node.machine.probe import Compute, default_slots, trial
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.local import Local
from atoll.strategies.vectors.flat import Flat
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.build import build
from atoll.train.computing import options_on
from atoll.train.results.outputs import Outputs
from atoll.train.state.committed import CommittedState, adopt
from atoll.train.state.saving import Saving
from atoll.train.trainer import Trainer
from atoll.wire.messages import Registered
from tests.accelerator.child import PRETENDED_ONLY
from tests.accelerator.noted import assert_one_model, computing, left_behind, on_processor
from tests.accelerator.pretended import RECORD
from tests.contracts.strategy_suite import adamw, batches, squared_error

TINY = {"layers": 1, "width": 16, "heads": 2, "context": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": TINY,
    "gpt2": TINY,
    "llama": TINY,
    "resnet": {"width": 8, "blocks": 1},
    "vit": {"layers": 1, "width": 16, "heads": 2},
}
STEPS = 8


def job(folder: Path, model: str = "gpt", **tables: dict[str, Any]) -> JobSpec:
    (folder / "text.py").write_text("def f(x):\n    return x + 1\n" * 300)
    images = model in ("resnet", "vit")
    base: dict[str, dict[str, Any]] = {
        "job": {"threads": 0},
        "model": {"name": model, **MODELS[model]},
        "data": {"corpus": "segments" if images else f"files:{folder}/*.py"},
        "train": {"steps": 3, "batch": 4, "warmup": 1, "eval_tokens": 64, "optimizer": "adamw"},
        "strategy": {"preset": "alone"},
    }
    for name, table in tables.items():
        base[name] = base.get(name, {}) | table
    return read_spec(base)


def trainer(spec: JobSpec, folder: Path, group: Group | None = None) -> Trainer:
    group = group or SingleGroup()
    folder = folder / group.me
    folder.mkdir(exist_ok=True)
    saving = Saving(DirectoryStore(folder / "saved"))
    return Trainer(spec, group=group, outputs=Outputs(folder), saving=saving)


def run(made: Trainer, *, until: int = 1_000) -> dict[str, Any]:
    try:
        return made.run(lambda: made.task.step == until)
    finally:
        made.recorder.close()


def start(**more: Any) -> Registered:
    return Registered(0, 1, 0, False, **more)


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.every(3)
def test_a_model_trains_on_the_accelerator_alone(
    model: str, tmp_path: Path, device: torch.device
) -> None:
    made = trainer(job(tmp_path, model), tmp_path)
    made.prepare(start())
    with on_processor() as found:
        run(made)
    assert made.device == device
    assert not computing(found)
    assert not left_behind(made.task.model, [made.task.optimizer])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "torch:Adafactor", "torch:NAdam"])
@pytest.mark.every(3)
def test_optimizers_keep_their_state_there(
    optimizer: str, tmp_path: Path, device: torch.device
) -> None:
    train = {"optimizer": optimizer, "accumulate": 2, "precision": "fp32", "momentum": 0.9}
    spec = job(tmp_path, "vit", train=train)
    made = trainer(spec, tmp_path)
    made.prepare(start())
    run(made)
    assert made.task.optimizer.state
    assert not left_behind(made.task.model, [made.task.optimizer])


def test_the_processor_gets_what_the_accelerator_gets(tmp_path: Path, device: object) -> None:
    results = [
        trainer(job(tmp_path, job={"device": at}, train={"precision": "fp32"}), tmp_path).train(
            start()
        )
        for at in ("cpu", "auto", str(device))
    ]
    losses = [result["loss_final"] for result in results]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("order", [("auto", "cpu"), ("cpu", "auto")])
@pytest.mark.every(2)
def test_a_checkpoint_goes_on_on_another_device(
    order: tuple[str, str], tmp_path: Path, device: object
) -> None:
    whole = {"precision": "fp32", "steps": 6}
    first = trainer(job(tmp_path, job={"device": order[0]}, train=whole), tmp_path)
    first.prepare(start())
    end = run(first, until=3)
    assert end["reason"]
    saved = first.task.round
    second = trainer(job(tmp_path, job={"device": order[1]}, train=whole), tmp_path)
    second.prepare(start(resume_round=saved))
    assert second.task.step == 3
    states = [t.task.optimizer.state_dict()["state"][0]["exp_avg"].cpu() for t in (first, second)]
    assert torch.equal(*states)
    result = run(second)
    straight = trainer(job(tmp_path, job={"device": "cpu"}, train=whole), tmp_path).train(start())
    assert result["loss_final"] == pytest.approx(straight["loss_final"], rel=1e-3)
    if order[1] == "auto":
        assert not left_behind(second.task.model, [second.task.optimizer])


class Member:
    """One member's model and method; the models of some are on the accelerator."""

    def __init__(self, group: Group, preset: str, device: torch.device) -> None:
        resolved = check_job(read_spec({"job": {"nodes": 2}, "strategy": {"preset": preset}}))
        model = six_layers().to(device)
        self.device, self.slot = device, int(group.me[1:])
        self.task = Task(model, adamw(model), member=group.me)
        self.outer = resolved.build()
        self.outer.setup(self.task, group=group, codec=make_codec(resolved.codec))
        self.outer.begin(self.task)
        self.bases: list[str] = []

    def train(self) -> None:
        local, stream = Local(squared_error, clip=1.0), batches(self.slot)
        for _ in range(STEPS):
            batch = placed(next(stream), self.device)
            if local.step(self.task, batch, self.outer).sync is not None:
                self.bases.append(self.outer.committed(self.task).base)
        self.outer.finish(self.task)
        self.bases.append(self.outer.committed(self.task).base)

    @property
    def end(self) -> Tensor:
        return Flat([*self.task.parameters(), *self.task.buffers()]).read()


def six_layers() -> nn.Module:
    parts = [part for _ in range(5) for part in (nn.Linear(5, 5), nn.Tanh())]
    model = nn.Sequential(*parts, nn.Linear(5, 2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.every(11)
def test_a_mixed_group_keeps_the_common_state_equal(preset: str, device: torch.device) -> None:
    def body(group: Group) -> Member:
        member = Member(group, preset, device if group.me == "w0" else torch.device("cpu"))
        member.train()
        return member

    here, there = MemoryGroups(2).together(body)
    assert not left_behind(here.task.model, [here.task.optimizer])
    assert all(p.device == device for p in here.task.parameters())
    if preset == "alone":
        return
    assert_one_model(preset, here.end, there.end)
    assert here.bases[-1] == there.bases[-1]
    if preset != "ad-psgd":  # pairs meet at times of their own
        assert here.bases == there.bases


def test_a_mixed_group_of_the_trainer_stays_equal(tmp_path: Path, device: object) -> None:
    lock = threading.Lock()
    strategy = {"preset": "diloco", "every": 2, "shared_steps": 0, "codec": "int8"}
    specs = {  # made before the members start, which read the corpus that `job` writes
        name: job(tmp_path, "gpt", job={"nodes": 2, "device": at}, strategy=strategy)
        for name, at in (("w0", "auto"), ("w1", "cpu"))
    }

    def body(group: Group) -> dict[str, Any]:
        made = trainer(specs[group.me], tmp_path, group)
        with lock:
            made.prepare(Registered(int(group.me[1:]), 2, 0, False))
        return run(made)

    first, second = MemoryGroups(2).together(body)
    assert first["digest"] == second["digest"]


def test_more_ranks_than_accelerators_compute_on_the_processor(device: torch.device) -> None:
    ranks = count() + 1
    assert choose("auto") == device
    assert choose("auto", local_rank=1, local_ranks=ranks) == torch.device("cpu")
    assert f"{ranks} ranks" in why_idle("auto", local_ranks=ranks)


@PRETENDED_ONLY
def test_a_missing_operator_is_named_with_a_way_out(tmp_path: Path, device: object) -> None:
    RECORD.missing_operators.add("embedding")
    with pytest.raises(ConfigError, match="lacks an operator") as refused:
        trainer(job(tmp_path), tmp_path).train(start())
    assert "aten::embedding" in str(refused.value)
    assert "PYTORCH_ENABLE_MPS_FALLBACK" in str(refused.value)


@PRETENDED_ONLY
def test_a_missing_number_type_is_refused_at_once(device: torch.device) -> None:
    RECORD.missing_dtypes.add(torch.float64)
    assert not facts(device).float64
    check_dtypes({torch.float32}, device)
    with pytest.raises(ConfigError, match="no numbers of type") as refused:
        check_dtypes({torch.float32, torch.float64}, device)
    assert 'device = "cpu"' in str(refused.value)


def test_bf16_is_taken_where_it_is(tmp_path: Path, device: torch.device) -> None:
    words = [options_on(job(tmp_path), at).precision for at in (device, torch.device("cpu"))]
    assert words == ["bf16", "fp32"]


def test_the_probe_measures_where_jobs_compute(device: torch.device) -> None:
    found = trial(seconds=0.01, size=8)
    assert (found.gpu, found.gpus) == (name_of(device), count())
    assert found.gpu_memory_bytes > 0
    assert RECORD.ran("mm") > 0
    kept = trial("cpu", seconds=0.01, size=8)
    assert (kept.gpu, kept.gpus) == ("", 0)
    slots = [default_slots(found, "auto"), default_slots(found, "cuda:1")]
    assert [*slots, default_slots(None, "auto")] == [1, 1, 1]
    assert default_slots(Compute(gpus=4), "auto") == 4


def test_random_numbers_of_the_accelerator_go_on(device: torch.device) -> None:
    state = random_state()
    drawn = torch.rand(3, device=device)
    set_random_state(state)
    assert torch.equal(torch.rand(3, device=device).cpu(), drawn.cpu())
    set_random_state({**state, "accelerators": []})  # saved on a machine without one


def test_the_next_batch_is_drawn_ahead_but_not_counted(tmp_path: Path, device: object) -> None:
    def stream(at: object) -> MemberStream:
        built = build(job(tmp_path), member="w0", slot=0, num_slots=1)
        return MemberStream(built.shards, slot=0, batch=4, device=at)  # type: ignore[arg-type]

    there, here = stream(device), stream(torch.device("cpu"))
    for _ in range(5):
        (inputs, _), (same, _) = next(there), next(here)
        assert inputs.device == device
        assert torch.equal(inputs.cpu(), same)
        assert there.cursor == here.cursor
        assert there.place() == here.place()
    there.move(0, {})
    here.move(0, {})
    assert torch.equal(next(there)[0].cpu(), next(here)[0])


@pytest.mark.parametrize("to_processor", [True, False])
def test_a_donor_serves_members_on_other_devices(to_processor: bool, device: torch.device) -> None:
    places = (device, torch.device("cpu"))
    giving, taking = places if to_processor else places[::-1]
    donor = Member(SingleGroup(), "diloco", giving)
    donor.train()
    parts = CommittedState(donor.task, donor.outer).parts()
    shared, inner = (part_of(MemoryImage(part).view, part.name) for part in parts)
    newcomer = Member(SingleGroup(), "diloco", taking)
    adopt(newcomer.task, newcomer.outer, shared=shared, inner=inner)
    assert torch.equal(newcomer.end, donor.end)
    batch = placed(next(batches(0)), taking)
    Local(squared_error).step(newcomer.task, batch, newcomer.outer)
    assert {p.device for p in newcomer.task.parameters()} == {taking}
    if not to_processor:
        assert not left_behind(newcomer.task.model, [newcomer.task.optimizer])
