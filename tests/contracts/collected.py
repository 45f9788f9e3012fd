"""Every contract suite that test files have, found by importing the files that mention it."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tests.contracts.strategy_suite import StrategySuite

TESTS = Path(__file__).resolve().parent.parent
T = TypeVar("T")


@cache
def suites() -> tuple[type[StrategySuite], ...]:
    """Return all suites of outer strategies."""
    found = collect(StrategySuite, "strategies")
    return tuple(suite for suite in found if getattr(suite, "options", None) is not None)


def suites_of(options: type[Any]) -> list[type[StrategySuite]]:
    """Return the suites of outer strategies whose options are of a type."""
    return [suite for suite in suites() if type(suite.options) is options]


def collect(contract: type[T], folder: str) -> list[type[T]]:
    """Return the subclasses of a contract that the test files of a folder hold."""
    for path in sorted((TESTS / folder).rglob("test_*.py")):
        if contract.__name__ in path.read_text(encoding="utf-8"):
            place = path.relative_to(TESTS).with_suffix("")
            importlib.import_module(".".join(("tests", *place.parts)))
    found: list[type[T]] = []
    todo = list(contract.__subclasses__())
    while todo:
        suite = todo.pop(0)
        todo += suite.__subclasses__()
        if suite.__module__.startswith("tests."):  # not the suite of the page that is walked
            found.append(suite)
    return found
