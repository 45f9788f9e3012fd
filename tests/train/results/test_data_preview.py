"""`data.json`: the report of tuning data and some examples, with what is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.data.tuning.dataset import load_examples
from atoll.data.tuning.options import ExampleOptions
from atoll.train.results.data_preview import NAME, SHOWN, preview_of, publish_preview
from tests.models.tiny import count_chats, save_tiny, tiny_tokenizer
from tests.train.test_preferences import load, record, write

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def test_examples_show_what_is_trained_on(pretrained: Path, tmp_path: Path) -> None:
    options = ExampleOptions(data=[str(count_chats(tmp_path / "chats.jsonl"))], context=64, seed=1)
    found = preview_of(load_examples(options, tiny_tokenizer(pretrained)))
    assert found["sentences"][0].startswith("60 examples of 60 records")
    assert len(found["examples"]) == SHOWN
    assert found["headings"] == [[]] * SHOWN
    for (answer,) in found["examples"]:
        (prompt, first), (said, trained) = answer
        assert (first, trained) == (False, True)
        assert prompt.startswith("<|im_start|>user\ncount ")
        assert said.startswith("the answer is ")


def test_preferences_show_both_answers(pretrained: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "pairs.jsonl", [record(number) for number in range(12)])
    found = preview_of(load(pretrained, pairs))
    assert found["headings"] == [["Chosen", "Rejected"]] * SHOWN
    for chosen, other in found["examples"]:
        assert chosen[1][0].startswith("the answer is ")
        assert other[1][0].startswith("count the user")


def test_other_data_have_no_preview(pretrained: Path, tmp_path: Path) -> None:
    sent: list[tuple[Any, str]] = []
    publish_preview(object(), tmp_path, lambda path, name: sent.append((path, name)))
    assert sent == []
    pairs = write(tmp_path / "pairs.jsonl", [record(number) for number in range(12)])
    publish_preview(load(pretrained, pairs), tmp_path, lambda path, name: sent.append((path, name)))
    ((path, name),) = sent
    assert (name, path) == (NAME, tmp_path / NAME)
    assert json.loads(path.read_text("utf-8"))["examples"]
