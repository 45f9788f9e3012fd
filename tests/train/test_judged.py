"""Answers with a label (KTO): rows, the loss by its definition, and members that learn."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from atoll.config import JobSpec
from atoll.data import BatchStream, Cursor
from atoll.data.tuning.dataset import ExampleSet, ExampleShards, load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.data.tuning.packing import IGNORED
from atoll.data.tuning.packing import UNMATCHED as MARK
from atoll.models.adapted import IGNORED as THEIRS
from atoll.models.preferring import UNMATCHED, JudgedLM
from atoll.train.build import build
from atoll.train.results.data_preview import preview_of
from tests.models.tiny import save_tiny, tiny_tokenizer
from tests.train.test_preferences import record, write
from tests.train.test_tuned import _one_at_a_time, spec_of, train

__all__ = ["_one_at_a_time"]

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")

Part = tuple[Tensor, Tensor]


def judged(number: int) -> dict[str, Any]:
    """Return a good answer for even numbers, a bad one for odd ones."""
    pair = record(number)
    said = pair["rejected"] if number % 2 else pair["chosen"]
    return {"prompt": pair["prompt"], "completion": said, "label": not number % 2}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write(folder / "answers.jsonl", [judged(n) for n in range(60)])


def load(pretrained: Path, file: Path) -> ExampleSet:
    options = ExampleOptions(
        data=[str(file)], context=96, seed=3, held_out=0.1, objective="kto", min_answer_tokens=1
    )
    return load_examples(options, tiny_tokenizer(pretrained))


def parts_of(row: Tensor, wanted: Tensor) -> tuple[Part, Part]:
    """Return ids and targets of a row's own answer, and of the answer to another prompt."""
    starts = [*(row[1] == 0).nonzero().flatten().tolist(), len(wanted)]
    own, other = slice(starts[0], starts[1]), slice(starts[1], starts[2])
    return (row[0, own], wanted[own]), (row[0, other], wanted[other])


def tokens(wanted: Tensor) -> Tensor:
    """Return the tokens that targets stand for, where something is trained."""
    said = torch.where(wanted < IGNORED - MARK, wanted + MARK, wanted)
    return torch.where(said >= 0, said, IGNORED - 1 - said)[wanted != IGNORED]


def all_of(found: ExampleSet) -> tuple[Tensor, Tensor]:
    return found.train.batch(np.arange(len(found.train), dtype=np.int64))


def test_a_row_is_an_answer_and_one_to_another_prompt(pretrained: Path, answers: Path) -> None:
    assert (MARK, IGNORED) == (UNMATCHED, THEIRS)
    found, tokenizer = load(pretrained, answers), tiny_tokenizer(pretrained)
    assert (found.quality.kept, len(found.train) + len(found.held_out)) == (60, 60)
    assert "30 good answers, 30 bad ones" in found.quality.sentences()
    for row, wanted in zip(*all_of(found), strict=True):
        (ids, own), (again, other) = parts_of(row, wanted)
        prompt = ids[: int((own != IGNORED).nonzero()[0]) + 1]
        assert torch.equal(again[: len(prompt)], prompt)
        said, theirs = tokenizer.decode(tokens(own)), tokenizer.decode(tokens(other))
        good = bool((own >= 0).any())
        assert said.startswith("the answer is" if good else "count the user")
        # Records alternate, so the latest one to another prompt has the other label.
        assert theirs.startswith("count the user" if good else "the answer is")
        assert bool((other < IGNORED - MARK).any())
        assert not bool((own < IGNORED - MARK).any())


def test_labels_come_in_several_forms(pretrained: Path, tmp_path: Path) -> None:
    plain = [{"prompt": f"{n} + 1 =", "completion": f" {n + 1}", "label": label}
             for n, label in enumerate([True, 0, "False", "1"])]  # fmt: skip
    wrong: list[dict[str, Any]] = [
        {"prompt": "1", "completion": "2"},
        {"prompt": "1", "completion": "2", "label": "so"},
        {"prompt": "", "completion": "2", "label": 1},
        {"text": "no prompt", "label": True},
        {"messages": record(1)["prompt"], "label": True},
        judged(2),
    ]
    quality = load(pretrained, write(tmp_path / "a.jsonl", [*plain, plain[0], *wrong])).quality
    assert (quality.kept, quality.good, quality.equal, quality.unreadable) == (4, 2, 1, 6)
    assert "a record has no label" in quality.first_error
    chats = [{"messages": [*judged(n)["prompt"], *judged(n)["completion"]], "label": n % 2}
             for n in range(4)]  # fmt: skip
    assert load(pretrained, write(tmp_path / "b.jsonl", chats)).quality.kept == 4
    long = {"prompt": "a " * 60, "completion": "b", "label": 1}
    quality = load(pretrained, write(tmp_path / "c.jsonl", [*plain, long])).quality
    assert "1 left out: longer than the context" in quality.sentences()


def test_pairs_are_two_labelled_answers(pretrained: Path, tmp_path: Path) -> None:
    answered = {"chosen": "the answer is", "rejected": "count the user"}
    pairs = [
        {"prompt": f"count {n}: "} | {name: f"{text} {n}" for name, text in answered.items()}
        for n in range(20)
    ]
    found = load(pretrained, write(tmp_path / "a.jsonl", pairs))
    assert (found.quality.kept, found.quality.good) == (40, 20)
    tokenizer = tiny_tokenizer(pretrained)
    for row, wanted in zip(*all_of(found), strict=True):
        said = [tokenizer.decode(tokens(part)) for _, part in parts_of(row, wanted)]
        numbers = [int(text.removesuffix("<|im_end|>").split()[-1]) for text in said]
        assert numbers[0] != numbers[1], "not the other answer to the same prompt"
    shown = preview_of(found)
    assert {heading for (heading,) in shown["headings"]} == {"Good", "Bad"}
    for (heading,), (answer,) in zip(shown["headings"], shown["examples"], strict=True):
        expected = "the answer is" if heading == "Good" else "count the user"
        assert answer[-1][0].startswith(expected)


def test_rows_are_dealt_once_and_go_on_exactly(pretrained: Path, answers: Path) -> None:
    def stream(slot: int, cursor: Cursor | None = None) -> BatchStream:
        dealt = ExampleShards(load(pretrained, answers).train, slots=2, seed=7)
        return BatchStream(dealt, slot=slot, batch=3, cursor=cursor)

    each = len(load(pretrained, answers).train) // 2
    seen = []
    for streamed in (stream(0), stream(1)):
        batches = [next(streamed) for _ in range(each // 3)]
        pairs = [parts_of(*one) for batch in batches for one in zip(*batch, strict=True)]
        seen.append({own.numpy().tobytes() for (own, _), _ in pairs})
    assert len(seen[0]) == len(seen[1]) == each
    assert not seen[0] & seen[1]
    first = stream(1)
    next(first)
    resumed = next(stream(1, Cursor.from_dict(first.cursor.to_dict())))
    assert all(torch.equal(a, b) for a, b in zip(next(first), resumed, strict=True))


def kto_spec(pretrained: Path, answers: Path, **tune: Any) -> JobSpec:
    spec = spec_of(pretrained, answers, objective="kto", **tune)
    options = {**spec.model.options, "context": 96}
    return dataclasses.replace(spec, model=dataclasses.replace(spec.model, options=options))


def test_the_loss_is_that_of_the_paper(pretrained: Path, answers: Path) -> None:
    spec = kto_spec(pretrained, answers, beta=0.5, desirable=1.5, undesirable=0.75)
    model = build(spec, member="w0", slot=0, num_slots=1).model
    assert isinstance(model, JudgedLM)
    inputs, targets = load(pretrained, answers).train.batch(np.arange(6, dtype=np.int64))
    good = (targets >= 0).any(1)
    assert 0 < int(good.sum()) < 6
    weight = torch.where(good, 1.5, 0.75).double()
    assert model.loss(inputs, targets).item() == pytest.approx(weight.mean().item() / 2, abs=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)

    def said(ids: Tensor, wanted: Tensor) -> Tensor:
        """Return ln p of an answer, alone and in fp64."""
        each = functional.log_softmax(model(ids[None])[0].double(), -1)[wanted != IGNORED]
        return each.gather(1, tokens(wanted)[:, None]).sum()

    def answered(side: int) -> Tensor:
        pairs = [parts_of(*one) for one in zip(inputs, targets, strict=True)]
        return torch.stack([said(*pair[side]) for pair in pairs])

    with torch.no_grad():
        now, now_other = answered(0), answered(1)
        learned = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(base, strict=False)
        then, then_other = answered(0), answered(1)
        model.load_state_dict(learned, strict=False)
    drift = (now_other - then_other).mean().clamp(min=0)
    value = weight * torch.sigmoid(0.5 * torch.where(good, 1.0, -1.0) * (now - then - drift))
    loss = model.loss(inputs, targets)
    assert loss.item() == pytest.approx((weight - value).mean().item(), rel=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert {n for n, p in model.named_parameters() if p.grad is not None} == trained


def test_members_learn_what_is_good(pretrained: Path, answers: Path, tmp_path: Path) -> None:
    first, second = train(kto_spec(pretrained, answers, beta=1.0), tmp_path)
    assert first["digest"] == second["digest"]
    assert first["first_loss_sum"] / first["first_tokens"] == pytest.approx(0.5, abs=1e-5)
    assert first["loss_final"] < 0.3
