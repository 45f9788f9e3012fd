"""Every contract suite of an outer strategy that a test file has."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

from tests.contracts.strategy_suite import StrategySuite

TESTS = Path(__file__).resolve().parent.parent / "strategies"


@cache
def suites() -> tuple[type[StrategySuite], ...]:
    """Return all suites, found by importing the files that mention the contract."""
    for path in sorted(TESTS.glob("test_*.py")):
        if "StrategySuite" in path.read_text(encoding="utf-8"):
            importlib.import_module(f"tests.strategies.{path.stem}")
    found: list[type[StrategySuite]] = []
    todo = list(StrategySuite.__subclasses__())
    while todo:
        suite = todo.pop(0)
        todo += suite.__subclasses__()
        if getattr(suite, "options", None) is not None:
            found.append(suite)
    return tuple(found)


def suites_of(options: type[Any]) -> list[type[StrategySuite]]:
    """Return the suites whose options are of a type."""
    return [suite for suite in suites() if type(suite.options) is options]
