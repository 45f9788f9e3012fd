"""The benchmark of modular models: what it subtracts from what, and what it does not do again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.dipaco import __main__ as program
from bench.dipaco.arms import QUICK


def write(file: Path, rows: list[tuple[int, str, dict[str, float]]]) -> None:
    with file.open("w", encoding="utf-8", newline="\n") as opened:
        for seed, arm, losses in rows:
            part = {"seed": seed, "arm": arm, "plan": repr(QUICK), "losses": losses}
            opened.write(json.dumps(part) + "\n")


def test_arms_are_compared_seed_by_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "parts.jsonl"
    rows: list[tuple[int, str, dict[str, float]]] = [
        (seed, "dense", {"dense": 2.5 + 10 * seed}) for seed in (1, 2, 3)
    ]
    rows += [
        (seed, "dipaco", {"dipaco": 2.0 + 10 * seed, "dipaco_rerouted": 1.75 + 10 * seed})
        for seed in (1, 2)
    ]
    rows += [(1, "independent", {"independent_rerouted": 12.0})]
    write(file, rows)
    given = ["bench", "--quick", "--seeds", "--out", str(file)]
    monkeypatch.setattr(sys, "argv", given)
    program.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["dense"]["loss"]["mean"] == pytest.approx(22.5)
    assert result["dense"]["difference"]["mean"] == pytest.approx(0.5)
    assert result["dense"]["difference"]["high"] == pytest.approx(0.5)  # two seeds, no spread
    assert (result["dense"]["seeds"], result["dipaco"]["seeds"]) == (3, 2)
    assert result["dipaco_rerouted"]["minus"] == "dipaco"
    assert result["independent_rerouted"]["minus"] == "dipaco_rerouted"
    assert result["independent_rerouted"]["difference"]["mean"] == pytest.approx(0.25)
    assert file.read_text(encoding="utf-8").count("\n") == len(rows)


def test_sixteen_paths_are_compared_with_each_other() -> None:
    assert program.compared_with("dipaco_by_turns") == "dipaco_16"
    assert program.compared_with("dipaco_by_turns_rerouted") == "dipaco_16_rerouted"
    assert program.compared_with("dipaco_16_rerouted") == "dipaco_16"
