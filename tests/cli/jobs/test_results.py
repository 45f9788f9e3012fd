"""What is printed at the end of a job: only what is known, and what went wrong in red."""

from __future__ import annotations

import io
import json
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
from rich.console import Console

from atoll.cli.jobs.results import _inside, finish, write_if_measured
from atoll.errors import WireError

SPEC = '[job]\nname = "own"\nnodes = 1\n{more}[model]\nname = "{model}"\n'
TRAINED = {"steps": 40, "tokens": 640, "wall_s": 2.0, "compute_s": 1.0, "replica": "a", "round": 4}
SHOWN = {"member": "w0", "node": "lap1", "sent_bytes": 0, "received_bytes": 0}


def printed(folder: Path, *, more: str = "", model: str = "gpt", **result: Any) -> str:
    """Finish a job of one member, and return what it prints."""
    (folder / "model.safetensors").touch()
    view = {
        "job": "own-1", "spec": SPEC.format(more=more, model=model),
        "committed_round": 4, "aborted_rounds": 0,
        "members": [{**SHOWN, "result": {**TRAINED, **result}}],
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    finish(folder, view=view, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("fields", "writes"),
    [
        ({"loss_final": 1.5}, True),
        ({"loss_final": 1.5, "model": "package.nets:make"}, False),
        ({"more": 'script = "mine.py"\n'}, False),
    ],
)
def test_only_language_models_are_offered_to_write(
    fields: dict[str, Any], writes: bool, tmp_path: Path
) -> None:
    text = printed(tmp_path, **fields)
    assert ("atoll generate" in text) is writes
    assert ("held-out loss" in text) is ("loss_final" in fields)


def test_samples_in_no_round_are_reported(tmp_path: Path) -> None:
    script = 'script = "mine.py"\n'
    whole = printed(tmp_path, more=script, data=[{"0": [1, 0, 50], "1": [1, 0, 50]}])
    assert "in no committed round" not in whole
    text = printed(tmp_path, more=script, data=[{"0": [1, 0, 50], "1": [0, 45, 50]}])
    assert "5 of 100 samples are in no committed round" in text


def test_script_that_counts_no_tokens_shows_none(tmp_path: Path) -> None:
    shown = printed(tmp_path, more='script = "mine.py"\n', tokens=0)
    assert "tokens" not in shown
    assert "held-out" not in shown
    assert "40" in shown


def test_collected_job_gets_its_report_in_any_state(tmp_path: Path) -> None:
    view: dict[str, Any] = {
        "job": "own-1", "spec": SPEC.format(more="", model="gpt"), "state": "failed",
        "reason": "w0: out of memory", "committed_round": 0, "aborted_rounds": 0,
        "members": [{**SHOWN, "result": None}],
    }  # fmt: skip
    assert write_if_measured(tmp_path, view=view) is None
    point = {"time": 1.0, "member": "w0", "step": 3, "round": 0, "values": {"loss": 2.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(point) + "\n", encoding="utf-8")
    report = write_if_measured(tmp_path, view=view)
    assert report is not None
    assert "The run failed: w0: out of memory. One machine took 3 steps" in report.read_text(
        "utf-8"
    )


@pytest.mark.parametrize("name", ["D:evil.py", "D:/evil.py", "../evil.py", "a\\b", "/evil.py", ""])
def test_a_hub_cannot_name_a_file_outside_the_folder(name: str) -> None:
    folder = PureWindowsPath("C:/runs/job")
    assert _inside(folder, "artifacts/w0/a.txt") == folder / "artifacts" / "w0" / "a.txt"
    with pytest.raises(WireError):
        _inside(folder, name)
