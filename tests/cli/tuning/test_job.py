"""The jobs of `atoll tune`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.cli.tuning.job import TuningOptions, job_tables, model_table, steps_of, tuning_job
from atoll.config import parse_spec
from atoll.errors import AtollError
from tests.models.tiny import docstring_chats, save_tiny

pytest.importorskip("transformers", reason="pip install 'atoll[hf]'")
pytest.importorskip("peft", reason="pip install 'atoll[tune]'")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("pretrained"))


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return docstring_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


def options(pretrained: Path, chats: Path, **changes: object) -> TuningOptions:
    values: dict[str, object] = {"model": str(pretrained), "data": [str(chats)], "context": 128}
    return TuningOptions(**(values | changes))  # type: ignore[arg-type]


def test_a_pass_is_as_many_steps_as_it_takes(pretrained: Path, chats: Path) -> None:
    submission, found, text = tuning_job(
        options(pretrained, chats, batch=2, nodes=3, passes=2.0), progress=lambda records: None
    )
    rows = len(found.train)
    assert submission.spec.train.steps == steps_of(rows, passes=2.0, each=6)
    assert submission.spec.train.steps * 6 >= 2 * rows
    assert parse_spec(text) == submission.spec
    assert submission.spec.job.nodes == 3


def test_more_members_than_rows_are_refused(pretrained: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps({"text": f"apple {n}"}) + "\n" for n in range(3)))
    with pytest.raises(AtollError, match="too few examples for so many members"):
        tuning_job(options(pretrained, few, nodes=5), progress=lambda records: None)


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"")
    assert model_table(str(tmp_path)) == {"source": str(tmp_path), "gguf": "m.gguf"}
    assert model_table(str(tmp_path / "m.gguf")) == {"source": str(tmp_path), "gguf": "m.gguf"}
    assert model_table("ada/counter") == {"source": "ada/counter"}


def test_data_of_a_model_hub_are_in_no_folder(pretrained: Path, chats: Path) -> None:
    chosen = TuningOptions(
        model=str(pretrained), data=[str(chats), "hub:ada/sums@main/*.jsonl", "ada/sums"]
    )
    named = job_tables(chosen, steps=1)["tune"]["data"]
    assert named == [str(chats.absolute()), "hub:ada/sums@main/*.jsonl", "ada/sums"]


def test_conditions_of_the_command_are_in_the_job(pretrained: Path, chats: Path) -> None:
    kept = options(pretrained, chats, keep=["messages != 0"])
    submission, found, _ = tuning_job(kept, progress=lambda records: None)
    assert submission.spec.tune.keep == ["messages != 0"]
    assert found.quality.filtered == 0
