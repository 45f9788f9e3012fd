"""The stages of a job train what its model trains in one process."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.config import JobSpec, ModelTable
from atoll.data import BatchStream
from atoll.errors import CheckpointError, CheckpointMissing, ConfigError
from atoll.models.partial import build as partial_build
from atoll.strategies.inner.swarm.evaluating import hidden_of, measured
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.train.build import build, load_data
from atoll.train.evaluate import evaluate
from atoll.train.optim.muon import LR_SCALE
from atoll.train.partly import stage_model
from atoll.train.swarm.build import JobStages, TrainedStage
from atoll.wire.swarm import HeldOutSum
from tests.train.swarm.kit import (
    COUNT,
    FromMembers,
    assert_same_state,
    early,
    job_of,
    place,
    step,
    tensors_of,
)

STEPS = 3


def test_stages_of_a_job_follow_its_schedule_and_data(tmp_path: Path) -> None:
    spec = job_of(tmp_path)
    built = build(spec, member="w0", slot=0, num_slots=1)
    stream = BatchStream(built.shards, slot=0, batch=spec.train.batch)
    stages = JobStages(spec, StageCut(stages=2), member="w0")
    path = [stages.take(place(stage)) for stage in range(2)]
    rows = stages.rows(COUNT)
    for number in range(STEPS):
        parts = [rows(number, index) for index in range(COUNT)]
        inputs, targets = next(stream)
        assert torch.equal(torch.cat([part[0] for part in parts]), inputs)
        built.task.optimizer.zero_grad()
        built.model.loss(inputs, targets).backward()
        built.task.optimizer.step()
        built.task.advance()
        step(path, rows, number)
    found = {n: p for stage in path for n, p in stage.runner.stage.parameters().items()}
    for name, parameter in built.model.named_parameters():
        assert torch.allclose(found[name], parameter, atol=2e-5), name
    assert path[0].optimizer.param_groups[0]["lr"] == built.task.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(("others", "number"), [(1, 0), (2, 0), (4, 0), (4, 2)])
def test_files_of_stages_give_any_number_of_stages(
    tmp_path: Path, others: int, number: int
) -> None:
    spec, states = early(job_of(tmp_path), number), FromMembers()
    path, rows = trained(spec, 2, states, save=True)
    later = JobStages(spec, StageCut(stages=others), member="w1", states=states)
    again = [later.take(place(stage, 2)) for stage in range(others)]
    for one in (path, again):
        step(one, rows, 2)
        step(one, rows, 3)
    old = {name: tensor for stage in path for name, tensor in tensors_of(stage).items()}
    new = {name: tensor for stage in again for name, tensor in tensors_of(stage).items()}
    assert set(old) == set(new)
    for name, tensor in old.items():
        # The norms of gradients are summed stage by stage, and clip = 100 never clips.
        assert torch.equal(new[name], tensor), name


def trained(
    spec: JobSpec, stages: int, states: FromMembers, *, save: bool = False
) -> tuple[list[TrainedStage], Any]:
    each = [
        JobStages(spec, StageCut(stages=stages), member=f"w{n}", states=states)
        for n in range(stages)
    ]
    path = [built.take(place(stage)) for stage, built in enumerate(each)]
    rows = each[0].rows(COUNT)
    for number in range(2):
        step(path, rows, number)
    for built in each if save else ():
        built.save(history=0, final=False, failed=pytest.fail)
    return path, rows


@pytest.mark.parametrize("number", [0, 2])
def test_a_stage_of_a_member_goes_on_bitwise(tmp_path: Path, number: int) -> None:
    spec, states = early(job_of(tmp_path), number), FromMembers()
    path, rows = trained(spec, 2, states)
    later = JobStages(spec, StageCut(stages=2), member="w1", states=states)
    again = [later.take(place(stage, 2, donors=["w0"])) for stage in range(2)]
    for one in (path, again):
        step(one, rows, 2)
    for old, new in zip(path, again, strict=True):
        assert_same_state(new, old)


def test_stages_train_by_muon_what_the_whole_model_does(tmp_path: Path) -> None:
    spec = early(job_of(tmp_path), 1)
    train = replace(spec.train, optimizer="muon", options={"rest": "nadam"})
    spec = replace(spec, train=train)
    built = JobStages(spec, StageCut(stages=4, cuts=(2, 3, 4)), member="w0")
    stages = [built.take(place(number)) for number in range(4)]
    matrices = [
        [tuple(p.shape) for group in one.optimizer.param_groups if LR_SCALE not in group
         for p in group["params"]]
        for one in stages
    ]  # fmt: skip
    assert [len(found) for found in matrices] == [0, 4, 4, 0]


def test_early_microbatches_need_an_optimizer_that_looks_ahead(tmp_path: Path) -> None:
    spec = early(job_of(tmp_path), 1)
    plain = replace(spec, train=replace(spec.train, optimizer="adamw"))
    with pytest.raises(ConfigError, match=r'looks ahead.*schedule = "sync"'):
        JobStages(plain, StageCut(stages=2), member="w0").take(place(0))


def test_the_state_of_another_step_or_model_is_refused(tmp_path: Path) -> None:
    spec, states = job_of(tmp_path), FromMembers()
    path, _ = trained(spec, 2, states)
    later = JobStages(spec, StageCut(stages=2), member="w1", states=states)
    with pytest.raises(CheckpointError, match="another state") as refused:
        later.take(place(0, 1, donors=["w0"]))
    assert "stage 0, step 2" in refused.value.message()
    states.files = [path[0].part()]
    with pytest.raises(CheckpointError, match="it lacks"):
        later.take(place(1, 2))
    with pytest.raises(CheckpointMissing, match="only the weights of the start"):
        JobStages(spec, StageCut(stages=2), member="w1").take(place(1, 2))


def test_a_state_read_during_a_pass_has_the_steps_buffers(tmp_path: Path) -> None:
    path, _ = trained(job_of(tmp_path), 1, FromMembers())
    stage = path[0]
    (before,) = [torch.ones(2)]
    buffer = torch.nn.Buffer(before.clone())
    stage.runner.stage._buffers["mean"] = buffer
    stage.runner._buffers = [buffer]
    stage.runner.begin(stage.round)
    buffer.zero_()  # as a pass of BatchNorm changes it
    assert torch.equal(stage.part().tensors["model/mean"], before)


def test_a_batch_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch = 8, 3 microbatches"):
        JobStages(job_of(tmp_path), StageCut(stages=2), member="w0").rows(3)


def test_a_lost_stage_becomes_the_mean_of_its_neighbours(tmp_path: Path) -> None:
    spec, states = job_of(tmp_path, layers=4), FromMembers()
    cut = StageCut(stages=3, cuts=(3, 5))  # each has a block
    later = JobStages(spec, cut, member="w1", states=states)
    path = [later.take(place(stage)) for stage in range(3)]
    for stage in (0, 2):
        path[stage].task.step = 2
    found = later.take(place(1, 2, neighbours=[["w0"], ["w2"]]))
    assert found.round == found.runner.step == 2
    old = {n: p for stage in (0, 2) for n, p in path[stage].runner.stage.parameters().items()}
    for name, parameter in found.runner.stage.parameters().items():
        kind = name.split(".", 2)[2]
        first, last = old[f"blocks.0.{kind}"], old[f"blocks.3.{kind}"]
        assert torch.allclose(parameter, (first + last) / 2), name
    assert not found.optimizer.state


def pretrained(folder: Path) -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=2, vocab_size=256, tie_word_embeddings=False
    )
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return {"source": str(folder), "context": 16}


@pytest.mark.parametrize("kind", ["gpt", "subspace", "pretrained"])
def test_a_member_builds_its_stage_only_bitwise(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_build, "LARGE_BYTES", 512)
    spec = job_of(tmp_path, layers=3)
    if kind == "pretrained":
        options = pretrained(tmp_path / "model")
        spec = replace(spec, model=ModelTable(name="transformers", options=options))
    if kind == "subspace":
        spec = replace(spec, swarm=replace(spec.swarm, stages=3, codec="subspace:4"))
    whole = build(spec, member="w0", slot=0, num_slots=1).model
    cut = StageCut(stages=3)
    expected = dict(whole.named_parameters())
    for number in range(3):
        found = stage_model(spec, load_data(spec), number, cut)
        assert not found.whole
        assert any(p.is_meta for p in found.model.parameters())
        own = JobStages(spec, cut, member="w0").take(place(number)).runner.stage
        if kind == "subspace":
            sized = replace(cut, size=4)
            expected = ModelStage(copy.deepcopy(whole), number, sized).parameters()
        assert own.parameters()
        for name, parameter in own.parameters().items():
            assert torch.equal(parameter, expected[name]), name


OWN_MODEL = """
from torch import nn

class Plain(nn.Module):
    def __init__(self, vocab_size, context, crossed=False):
        super().__init__()
        self.table = nn.Embedding(vocab_size, 8)
        self.hidden, self.last = nn.Linear(8, 8), nn.Linear(8, vocab_size)
        self.crossed = crossed

    def forward(self, ids):
        x = self.table(ids)
        return self.last(self.hidden(x) + x if self.crossed else self.hidden(x))
"""


def test_layers_of_an_own_model_are_tried_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_chain.py").write_text(OWN_MODEL)
    monkeypatch.syspath_prepend(tmp_path)

    def path_of(**options: object) -> list[TrainedStage]:
        options = {"context": 16, **options}
        model = ModelTable(name="own_chain:Plain", options=options)
        stages = JobStages(replace(job_of(tmp_path), model=model), StageCut(stages=2), member="w0")
        return [stages.take(place(stage)) for stage in range(2)]

    names = [sorted(stage.runner.stage.parameters()) for stage in path_of()]
    assert names == [["hidden.bias", "hidden.weight", "table.weight"], ["last.bias", "last.weight"]]
    with pytest.raises(ConfigError, match="the outputs differ from the model's"):
        path_of(crossed=True)


def test_stages_measure_what_the_trainer_would(tmp_path: Path) -> None:
    spec = job_of(tmp_path)
    spec = replace(spec, train=replace(spec.train, eval_tokens=100, eval_every=2))
    built = build(spec, member="w0", slot=0, num_slots=1)
    spec = replace(spec, swarm=replace(spec.swarm, microbatches=COUNT))
    stages = JobStages(spec, StageCut(stages=2), member="w0")
    path = [stages.take(place(stage)) for stage in range(2)]
    rows, (between, end) = stages.rows(COUNT), stages.held_out
    for limit, indices in ((100, range(between)), (None, range(between, between + end))):
        found = [evaluated(path, rows(0, COUNT + index)) for index in indices]
        plain = evaluate(built.model, built.held_out, limit_tokens=limit)
        assert sum(one.targets for one in found) == plain.tokens
        assert sum(one.loss_sum for one in found) == pytest.approx(plain.loss_sum, rel=1e-6)
    due = [path[0].evaluates]
    for number in range(3):
        step(path, rows, number)
        due.append(path[0].evaluates)
    assert due == [True, False, True, False]


def test_stages_count_images_that_are_classified_correctly(tmp_path: Path) -> None:
    spec = job_of(tmp_path)
    spec = replace(
        spec, data=replace(spec.data, corpus="segments"), train=replace(spec.train, eval_tokens=30),
        model=ModelTable(name="resnet", options={"width": 8, "blocks": 1}),
        swarm=replace(spec.swarm, microbatches=COUNT),
    )  # fmt: skip
    built = build(spec, member="w0", slot=0, num_slots=1)
    stages = JobStages(spec, StageCut(stages=2), member="w0")
    path = [stages.take(place(stage)) for stage in range(2)]
    rows = stages.rows(COUNT)
    found = [evaluated(path, rows(0, COUNT + index)) for index in range(stages.held_out[0])]
    plain = evaluate(built.model, built.held_out, limit_tokens=30)
    assert sum(one.correct for one in found) == plain.correct
    assert sum(one.loss_sum for one in found) == pytest.approx(plain.loss_sum, rel=1e-5)
    assert stages.bytes_per_token is None


def evaluated(path: list[TrainedStage], rows: Any) -> HeldOutSum:
    values: tuple[torch.Tensor, ...] = (rows[0],)
    for stage in path[:-1]:
        values = hidden_of(stage.runner.stage, values)
    return measured(path[-1].runner.stage, values, rows[1])
