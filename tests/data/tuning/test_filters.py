"""Conditions on columns decide which records are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.data.tuning.dataset import load_examples
from atoll.data.tuning.filters import Condition
from atoll.data.tuning.options import ExampleOptions
from atoll.errors import ConfigError, DataError
from tests.models.tiny import count_chat, save_tiny, tiny_tokenizer

RECORD = {"score": 4, "share": "0.5", "language": "en", "checked": True, "none": None}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("score >= 4", True), ("score>4", False), ("score != 3", True), ("share < 1", True),
        ("share=0.50", True), ("language = en", True), ("language != de", True),
        ("language < 3", False), ("checked = true", True), ("checked = 1", False),
        ("none = None", False), ("other != 1", False),
    ],
)  # fmt: skip
def test_a_condition_compares_numbers_or_texts(text: str, holds: bool) -> None:
    assert Condition.parse(text).holds(RECORD) is holds


@pytest.mark.parametrize(
    "text",
    ["score", "score ~ 3", "language < en", "", "= 3", "score == 4", "score = = 4", "score =< 4"],
)
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a condition on records cannot be read"):
        Condition.parse(text)


def test_only_what_meets_all_conditions_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
    tokenizer: Any = tiny_tokenizer(save_tiny(tmp_path / "tiny"))
    records = [count_chat(n) | {"score": n % 4, "language": "en" if n < 20 else "de"}
               for n in range(40)]  # fmt: skip
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    options = ExampleOptions(
        data=[str(file)], context=64, seed=3, keep=["score >= 2", "language = en"]
    )
    quality = load_examples(options, tokenizer).quality
    assert (quality.records, quality.kept, quality.filtered) == (40, 10, 30)
    assert "30 left out: not as `keep` wants them" in quality.sentences()
    none = dataclasses.replace(options, keep=["score >= 40"])
    with pytest.raises(DataError, match="40 left out: not as `keep` wants them"):
        load_examples(none, tokenizer)
