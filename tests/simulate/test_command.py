"""`atoll simulate` on the example, and the benchmark of ten thousand members in small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.simulate.world import simulate
from bench.simulate.many import row_of, setting_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "fleet_many.toml"


def test_the_example_says_what_breaks_first() -> None:
    words = ["simulate", str(EXAMPLE), "--members", "300", "--hours", "1", "--exchange", "5MB"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "goodput" in done.stdout
    assert "first of all: the line into the hub's reducer" in done.stdout


def test_the_example_with_a_quorum_as_json() -> None:
    words = ["simulate", str(EXAMPLE), "--members", "300", "--hours", "2", "--exchange", "1MB"]
    found = []
    for quorum in ("0", "0.9"):
        done = CliRunner().invoke(app, [*words, "--quorum", quorum, "--json"])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout))
    plain, quick = (one["goodput"] for one in found)
    assert quick > plain + 0.05
    assert sum(found[1]["shares"].values()) == pytest.approx(1.0)


def test_the_benchmark_has_a_row_for_each_rule() -> None:
    rows = []
    for quorum in (0.9, 0.0):
        setting = setting_of(members=100, hours=1.0, quorum=quorum, every=500)
        rows.append(row_of(simulate(setting), quorum))
    assert rows[0]["goodput"] > rows[1]["goodput"]
    assert all(row["rounds"] > 1 for row in rows)


PLANNING = EXAMPLE.parent / "planning"
JOB = [
    "simulate", str(PLANNING / "six.toml"), "--job", str(PLANNING / "small.toml"), "--json",
    "--hours", "0.1", "--route", "relay",
]  # fmt: skip


def found(*words: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*JOB, *words])
    assert done.exit_code == 0, done.output
    values: dict[str, Any] = json.loads(done.stdout)
    return values


def test_machines_beyond_the_members_of_a_job_are_spare() -> None:
    own = found()
    assert (own["members"], own["machines"]) == (3, 6)
    assert own["shares"]["spare"] == pytest.approx(0.5)
    assert own["goodput"] > 0.5  # of the others' time
    assert own["steps"] == 20 * (own["rounds_committed"] - 1)


def test_options_that_are_typed_win_over_the_job() -> None:
    typed = found("--members", "6", "--exchange", "1MB", "--every", "40")
    assert (typed["members"], typed["machines"]) == (6, 6)
    assert typed["steps"] == 40 * (typed["rounds_committed"] - 1)
    contributions = sum(row["members"] for row in typed["timeline"])
    assert typed["member_bytes"] == pytest.approx(1e6 * contributions, rel=0.2)  # and states
    assert found("--seed", "5")["timeline"] != found("--seed", "6")["timeline"]


def test_a_job_and_machines_that_contradict_are_refused_in_words() -> None:
    done = CliRunner().invoke(app, [*JOB, "--machines", "2"])
    assert done.exit_code != 0
    assert "never start" in str(done.exception)
    done = CliRunner().invoke(app, [*JOB, "--min-members", "4"])
    assert done.exit_code != 0
    assert "no more at least than are wanted" in str(done.exception)
