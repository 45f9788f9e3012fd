"""Preferences (DPO): rows of two answers, the loss by its definition, and members that learn."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from atoll.config import JobSpec, read_spec
from atoll.data.tuning.dataset import ExampleSet, load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import IGNORED
from atoll.errors import ConfigError, DataError
from atoll.models.preferring import PreferringLM
from atoll.train.build import build
from tests.models.tiny import save_tiny, tiny_tokenizer
from tests.train.test_tuned import _one_at_a_time, spec_of, train

__all__ = ["_one_at_a_time"]

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


def record(number: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": f"count {number} apples"}],
        "chosen": [{"role": "assistant", "content": f"the answer is {number % 7}"}],
        "rejected": [{"role": "assistant", "content": "count the user"}],
    }


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "pairs.jsonl", [record(n) for n in range(60)])


def load(pretrained: Path, file: Path, **more: Any) -> ExampleSet:
    options = ExampleOptions(
        data=[str(file)], context=96, seed=3, held_out=0.1, objective="dpo", **more
    )
    return load_examples(options, tiny_tokenizer(pretrained))


def dpo_spec(pretrained: Path, pairs: Path, **tune: Any) -> JobSpec:
    spec = spec_of(pretrained, pairs, objective="dpo", **tune)
    options = {**spec.model.options, "context": 96}
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, options=options))


def test_a_row_is_two_answers_to_one_prompt(pretrained: Path, pairs: Path) -> None:
    found, tokenizer = load(pretrained, pairs), tiny_tokenizer(pretrained)
    assert (found.quality.kept, len(found.train) + len(found.held_out)) == (60, 60)
    inputs, targets = next(found.batches(batch=3))
    assert inputs.shape[:2] == (3, 3)
    for row, wanted in zip(inputs, targets, strict=True):
        chosen = tokenizer.decode(wanted[wanted >= 0])
        other = tokenizer.decode(IGNORED - 1 - wanted[wanted < IGNORED])
        assert chosen.startswith("the answer is ")
        assert other == "count the user<|im_end|>\n"
        trained = wanted != IGNORED
        said = torch.where(wanted >= 0, wanted, IGNORED - 1 - wanted)
        assert torch.equal(row[2][trained], said[trained])


def test_records_without_a_preference_are_left_out(pretrained: Path, tmp_path: Path) -> None:
    long = record(1) | {"rejected": [{"role": "assistant", "content": "apples " * 90}]}
    same = record(2) | {"rejected": record(2)["chosen"]}
    plain = {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}
    lists = {name: [{"role": "user", "content": "a"}, {"role": "assistant", "content": name}]
             for name in ("chosen", "rejected")}  # fmt: skip
    records = [record(1), record(1), long, same, {"text": "a"}, plain, lists]
    quality = load(pretrained, write(tmp_path / "some.jsonl", records)).quality
    counts = (quality.kept, quality.equal, quality.long, quality.unreadable)
    assert counts == (3, 1, 1, 2)
    assert "both answers of a record are the same" in quality.first_error
    said = " ".join(quality.sentences())
    assert "1 left out: both answers together are longer than the context" in said
    with pytest.raises(DataError, match="too few examples"):
        load(pretrained, write(tmp_path / "none.jsonl", [{"text": "a"}]))


def test_the_loss_is_that_of_the_paper(pretrained: Path, pairs: Path) -> None:
    built = build(dpo_spec(pretrained, pairs), member="w0", slot=0, num_slots=1)
    model = built.model
    assert isinstance(model, PreferringLM)
    inputs, targets = next(load(pretrained, pairs).batches(batch=6))
    assert model.loss(inputs, targets).item() == pytest.approx(math.log(2), abs=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def said(row: int, *, chosen: bool) -> float:
        """Return ln p of one answer, alone and in fp64."""
        starts = (inputs[row, 1] == 0).nonzero().flatten().tolist()
        span = slice(starts[0], starts[1]) if chosen else slice(starts[1], None)
        ids, wanted = inputs[row, 0, span], targets[row, span]
        token = wanted if chosen else IGNORED - 1 - wanted
        logits = model(ids[None])[0].double()
        each = functional.log_softmax(logits, -1).gather(1, token.clamp(0)[:, None])[:, 0]
        return float(each[wanted != IGNORED].sum())

    def margins() -> list[float]:
        return [said(row, chosen=True) - said(row, chosen=False) for row in range(6)]

    with torch.no_grad():
        ours = margins()
        now = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(base, strict=False)
        theirs = margins()
        model.load_state_dict(now, strict=False)
    margin = 0.1 * (torch.tensor(ours) - torch.tensor(theirs))
    expected = -functional.logsigmoid(margin).mean()
    loss = model.loss(inputs, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    with torch.no_grad():
        assert model.loss(inputs, targets).item() == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
    assert {n for n, p in model.named_parameters() if p.requires_grad} == trained


def test_members_learn_what_is_preferred(pretrained: Path, pairs: Path, tmp_path: Path) -> None:
    first, second = train(dpo_spec(pretrained, pairs, beta=1.0), tmp_path)
    assert first["digest"] == second["digest"]
    assert first["first_loss_sum"] / first["first_tokens"] == pytest.approx(math.log(2), abs=1e-5)
    assert first["loss_final"] < 0.3


def test_preferences_need_adapters() -> None:
    with pytest.raises(ConfigError, match="preferences are learned by adapters"):
        read_spec({
            "model": {"source": "x"},
            "tune": {"data": ["x.jsonl"], "method": "full", "objective": "dpo"},
        })  # fmt: skip
