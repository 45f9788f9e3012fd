"""`atoll simulate` on the example, and the benchmark of ten thousand members in small."""

from __future__ import annotations

import json
from pathlib import Path

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
