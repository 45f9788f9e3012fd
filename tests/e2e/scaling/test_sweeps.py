"""A sweep with real processes: it goes on where it was interrupted, and its runs give a law."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from tests.e2e.conftest import Atoll, until

pytestmark = pytest.mark.e2e

SIZE = r"\[\[sweep\.sizes\]\]"
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "scaling_sweep.toml"


def shortened(atoll: Atoll, *, runs: int = 6) -> Path:
    """Write the example with six runs, the fewest a law needs, or with two of one member."""
    text = EXAMPLE.read_text("utf-8")
    for before, after in (
        ("tokens = [65_536, 131_072, 262_144]", "tokens = [8_192]"),
        ("members = [1, 2]", "members = [1, 2]" if runs == 6 else "members = [1]"),
        ("batch = 16 ", "batch = 4 "),
        ("every = 16 ", "every = 8 "),
        ("layers = 2", "layers = 1"),
        ("context = 64", "context = 32"),
        ("[train]", "[train]\neval_tokens = 2048"),
    ):
        assert before in text
        text = text.replace(before, after)
    if runs == 2:  # two sizes
        third = next(islice(re.finditer(SIZE, text), 2, None)).start()
        text = text[:third] + text[text.index("[job]") :]
    path = atoll.folder / "scaling_sweep.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.long(
    "tests/e2e/scaling/test_sweeps.py::test_an_interrupted_sweep_keeps_what_has_ended"
)
def test_the_example_runs_is_not_repeated_and_gives_a_law(atoll: Atoll) -> None:
    path = shortened(atoll)
    done = atoll.run("scaling", "sweep", str(path), "--local", "2")
    assert done.code == 0, done.both
    assert "6 of 6 runs have ended" in done.out
    folder = atoll.folder / "runs" / "scaling_sweep"
    jobs = json.loads((folder / "sweep.json").read_text("utf-8"))["jobs"]
    assert len(jobs) == 6

    lost = sorted(jobs)[0]
    (folder / jobs[lost] / "summary.json").unlink()
    again = atoll.run("scaling", "sweep", str(path), "--local", "2")
    assert again.code == 0, again.both
    assert "1 runs of scaling_sweep" in again.out
    assert "5 have ended before" in again.out
    after = json.loads((folder / "sweep.json").read_text("utf-8"))["jobs"]
    assert {key for key in jobs if after[key] != jobs[key]} == {lost}

    law = ["scaling", "fit", "runs/scaling_sweep", "--law", "params,members", "--shape", "power"]
    found = atoll.run(*law, "--json", "--predict", "params=1e5", "--out", "law")
    assert found.code == 0, found.both
    told = json.loads(found.out)
    assert len(told["points"]) == 6
    assert told["counted"] == "parameters without embeddings and output layer"
    assert {point["members"] for point in told["points"]} == {1.0, 2.0}
    assert {point["batch"] for point in told["points"]} == {4.0}
    assert {point["tokens"] for point in told["points"]} == {8_192.0}
    assert 0 < told["predictions"][0]["loss"] < 6
    assert (atoll.folder / "law" / "scaling.html").exists()
    atoll.assert_ended()


def test_an_interrupted_sweep_keeps_what_has_ended(atoll: Atoll) -> None:
    path = shortened(atoll, runs=2)
    going = atoll.start("scaling", "sweep", str(path), "--local", "1")
    folder = atoll.folder / "runs" / "scaling_sweep"
    until(lambda: list(folder.glob("*/summary.json")))
    going.interrupt()
    stopped = going.wait()
    ended = {file.parent.name for file in folder.glob("*/summary.json")}
    if len(ended) < 2:  # else the last run ended before the signal came
        assert stopped.code == 130, stopped.both
        assert "1 of 2 runs are left" in stopped.out
    again = atoll.run("scaling", "sweep", str(path), "--local", "1")
    assert again.code == 0, again.both
    jobs = json.loads((folder / "sweep.json").read_text("utf-8"))["jobs"]
    assert ended <= set(jobs.values())
    assert {file.parent.name for file in folder.glob("*/summary.json")} == set(jobs.values())
    atoll.assert_ended()
