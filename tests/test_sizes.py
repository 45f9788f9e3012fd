"""What cannot be taken in at a glance is too large: folders, files, lists of parameters."""

from __future__ import annotations

import ast

import pytest

from tests.test_layers import PACKAGE, ROOT, sources

MOST_FILES = 25
"""Python files of one folder."""
MOST_LINES = 400
MOST_PARAMETERS = 7
"""Of one function, without `self` and `cls`. Commands of the terminal have one for each option."""


@pytest.mark.parametrize("root", ["atoll", "tests"])
def test_folders_hold_few_files(root: str) -> None:
    folders = {path.parent for path in (ROOT / root).rglob("*.py")}
    counts = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in counts.items() if count > MOST_FILES} == {}


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in sources()
    }
    assert {name for name, length in lengths.items() if length > MOST_LINES} == set()


def test_functions_have_few_parameters() -> None:
    many = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sources()
        if not path.is_relative_to(PACKAGE / "cli")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _parameters(node.args) > MOST_PARAMETERS
    ]
    assert not many, "\n".join(many)


def _parameters(given: ast.arguments) -> int:
    named = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))
