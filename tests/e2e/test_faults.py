"""Jobs that do not go well: each ends as it should, with a message that says which node and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Atoll, until

pytestmark = pytest.mark.e2e


def folder_of(atoll: Atoll) -> Path:
    """Return the folder of the only job, as soon as it is there."""
    until(lambda: atoll.runs.exists() and [p for p in atoll.runs.iterdir() if p.name[0] != "."])
    return atoll.job_folder()


def events_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of a kind that the run has told so far."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.long("tests/node/agent/test_agent.py::test_failing_script_shows_line_and_traceback")
def test_script_that_raises_shows_its_traceback_and_its_node(atoll: Atoll) -> None:
    (atoll.folder / "train.py").write_text(
        "import atoll\nwith atoll.join() as run:\n    raise ValueError('boom on purpose')\n"
    )
    done = atoll.run("run", "train.py", "--local", "1")
    assert done.code == 1
    assert "raised ValueError: boom on purpose" in done.err
    assert "Traceback (most recent call last)" in done.both
    assert "last lines on node" in done.err
    later = atoll.run("logs", str(atoll.job_folder()))
    assert "boom on purpose" in later.out, "the hub is gone, the lines are not"
    atoll.assert_ended()


@pytest.mark.long(
    "tests/train/test_trainer.py::test_a_loss_that_is_not_finite_names_member_and_step"
)
def test_non_finite_loss_is_named_and_never_averaged(atoll: Atoll) -> None:
    done = atoll.run("run", str(atoll.job(lr="1e9", steps=200)), "--local", "2")
    assert done.code == 1, done.both
    assert "finite" in done.err
    assert "step" in done.err
    assert "w0" in done.err or "w1" in done.err
    rows = (atoll.job_folder() / "metrics.jsonl").read_text()
    assert "NaN" not in rows


@pytest.mark.long(
    "tests/node/launchers/test_process.py::test_script_that_runs_out_of_memory_is_called_that"
)
def test_worker_that_runs_out_of_memory_is_named_so(atoll: Atoll) -> None:
    (atoll.folder / "train.py").write_text("x = bytearray(10**18)\n")
    done = atoll.run("run", "train.py", "--local", "1")
    assert done.code == 1
    assert "out of memory" in done.err


@pytest.mark.long("tests/data/test_split.py::test_too_small_a_text_names_both_sizes")
@pytest.mark.parametrize(
    ("text", "words"),
    [("too short", "too small"), (None, "match")],
)
def test_missing_or_small_text_is_refused(atoll: Atoll, text: str | None, words: str) -> None:
    job = atoll.job()
    source = atoll.folder / "text.txt"
    if text is None:
        source.unlink()
    else:
        source.write_text(text)
    done = atoll.run("run", str(job), "--local", "1")
    assert done.code == 1, done.both
    assert "DataError" not in done.err.splitlines()[-1]
    assert words in done.err, done.err
