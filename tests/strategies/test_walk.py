"""The code of docs/develop/adding_a_strategy.md is a method that passes the contract suite."""

from __future__ import annotations
import __future__

import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.config import StrategyTable
from atoll.methods import periodic
from atoll.methods.table import METHODS, PRESETS, presets_of
from atoll.strategies import compatibility, outer, resolve, traffic_table
from tests.contracts import strategy_suite
from tests.contracts.strategy_suite import StrategySuite

PAGE = Path(__file__).resolve().parents[2] / "docs" / "develop" / "adding_a_strategy.md"
PROMISES = [name for name in dir(StrategySuite) if name.startswith("test_")]


def code_blocks() -> dict[str, str]:
    """Return path -> text of the Python files and rows on the page."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"```python\n# (\S+)\n(.*?)```", text, flags=re.DOTALL)
    return dict(found)


def run_code(text: str, names: dict[str, Any]) -> None:
    flags = __future__.annotations.compiler_flag
    exec(compile(text, str(PAGE), "exec", flags=flags, dont_inherit=True), names)


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[StrategySuite]:
    """Put the row, the file and the suite of the page where the page says."""
    blocks = code_blocks()
    names = dict(vars(periodic))
    run_code(blocks["atoll/methods/periodic.py"], names)
    row = names["Lookahead"]
    monkeypatch.setattr(periodic, "Lookahead", row, raising=False)
    (tmp_path / "lookahead.py").write_text(blocks["atoll/strategies/outer/lookahead.py"])
    monkeypatch.setattr(outer, "__path__", [*outer.__path__, str(tmp_path)])
    presets = {preset.name: preset for preset in presets_of(row)}
    for module in (resolve, traffic_table):
        monkeypatch.setattr(module, "METHODS", {**METHODS, row.name: row})
        monkeypatch.setattr(module, "PRESETS", {**PRESETS, **presets})
    monkeypatch.setattr(strategy_suite, "GOLDEN", tmp_path)
    tests: dict[str, Any] = {"__name__": "walked"}
    run_code(blocks["tests/strategies/outer/test_lookahead.py"], tests)
    importlib.invalidate_caches()
    suite: type[StrategySuite] = tests["TestLookahead"]
    return suite


def cases(promise: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which pytest would call a test of the suite."""
    marks = [mark for mark in getattr(promise, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        yield {mark.args[0]: value for mark, value in zip(marks, values, strict=True)}


@pytest.mark.parametrize("promise", PROMISES)
def test_the_method_of_the_page_keeps_each_promise(
    walked: type[StrategySuite], promise: str
) -> None:
    suite = walked()
    request = SimpleNamespace(config=SimpleNamespace(getoption=lambda *_, **__: True))
    for arguments in cases(getattr(walked, promise)):
        if "request" in inspect.signature(getattr(suite, promise)).parameters:
            arguments["request"] = request
        getattr(suite, promise)(**arguments)


def test_a_job_file_and_atoll_methods_know_its_row(walked: type[StrategySuite]) -> None:
    table = StrategyTable(preset="lookahead", options={"share": 0.25})
    resolved = resolve.resolve(table)
    compatibility.check(resolved, nodes=4)
    assert type(resolved.build()).__name__ == "LookaheadOuter"
    scale = traffic_table.Scale(parameters=1_000, peers=2, steps=32)
    row = traffic_table.one_row("lookahead", scale)
    assert [option["name"] for option in row["options"]] == ["every", "share"]
    assert row["rounds"] == 3
    assert walked.options.share == 0.5


def test_the_file_of_the_page_has_at_most_60_lines() -> None:
    assert len(code_blocks()["atoll/strategies/outer/lookahead.py"].splitlines()) <= 60
