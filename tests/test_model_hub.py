"""A data set of a model hub is fetched with the library's own client, once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.data.tuning.records import find_files, read_records
from atoll.errors import ConfigError, DataError
from atoll.model_hub import HubFiles
from tests.export.model_hub import ModelHub, Repository, model_hub

constants: Any = pytest.importorskip(
    "huggingface_hub.constants", reason="pip install 'atoll[tune]'"
)

ROWS = [{"prompt": f"{n}?", "completion": f"{n + 1}"} for n in range(3)]


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModelHub]:
    """A hub with the data set `ada/sums`, and a machine that has fetched nothing."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with model_hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        place = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", place)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        files = {
            "README.md": b"# sums", "data/train-0.jsonl": lines(ROWS[:2]),
            "data/train-1.jsonl": lines(ROWS[2:]), "data/test-0.jsonl": lines(ROWS),
        }  # fmt: skip
        running.repositories["datasets/ada/sums"] = Repository(private=False, files=files)
        yield running


def records(entry: str) -> list[Any]:
    return [record for file in find_files([entry])[0] for record in read_records(file)]


def test_the_files_for_training_are_fetched_once(at: ModelHub) -> None:
    assert records("hub:ada/sums") == ROWS
    once = list(at.read)
    assert {Path(file).name for file in once} == {"train-0.jsonl", "train-1.jsonl"}
    assert records("hub:ada/sums") == ROWS
    assert len(at.read) <= len(once) + 2  # it asks whether they have changed


def test_some_files_are_chosen_by_a_pattern(at: ModelHub) -> None:
    assert records("hub:ada/sums@main/data/*-0.jsonl") == ROWS + ROWS[:2]


def test_what_was_fetched_before_needs_no_hub(
    at: ModelHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert records("hub:ada/sums") == ROWS
    monkeypatch.setattr(constants, "is_offline_mode", lambda: True)
    assert records("hub:ada/sums") == ROWS
    with pytest.raises(DataError, match="its hub cannot be asked") as caught:
        records("hub:ada/other")
    assert "hf download --repo-type dataset ada/other" in str(caught.value.remedy)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("hub:ada/nothing", "the hub did not give the data set ada/nothing"),
        ("hub:ada/two--dashes", "the hub did not give the data set ada/two--dashes"),
        ("hub:ada/sums/data/*.parquet", "data/train-0.jsonl"),
    ],
)
def test_what_is_not_there_is_said(at: ModelHub, entry: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        find_files([entry])
    assert says in str(caught.value)


@pytest.mark.parametrize("entry", ["hub:", "hub:sums", "hub:a/b@", "hub:a b/c"])
def test_a_malformed_name_says_what_is_expected(entry: str) -> None:
    with pytest.raises(ConfigError, match="hub:OWNER/NAME"):
        find_files([entry])


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["train.jsonl", "test.jsonl", "README.md"], ["train.jsonl"]),
        (["b.parquet", "a.parquet", "valid.parquet", "c.py"], ["a.parquet", "b.parquet"]),
        (["contest.jsonl", "dev-1.jsonl"], ["contest.jsonl"]),
    ],
)
def test_files_that_are_held_out_are_not_trained_on(files: list[str], chosen: list[str]) -> None:
    assert HubFiles.parse("hub:a/b").choose(files) == chosen
