"""Long tests, which `make test` leaves out, and the tests that keep their promises meanwhile.

`@pytest.mark.long("tests/room/test_file.py::test_name")` names the test that checks the same
promise in small: `make test` runs that one, `make test-all` both. tests/test_tiers.py holds this.
`@pytest.mark.every(n)` makes all but every n-th of a test's parameters long; the others stand in.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

V = TypeVar("V")
LONG = "long"
LONGEST_S = 900
"""After which a long test is given up; for others see pyproject.toml."""
WHOLE = 100
"""Examples of a property in a whole run that says no number."""


def examples(number: int) -> int:
    """Return how many examples a property is tried with: so many in a whole run, else a share.

    The share is that of `max_examples` in the chosen profile (`tests/conftest.py`).
    """
    default: Any = settings.default
    share: int = default.max_examples
    return max(1, number * share // WHOLE)


def sampled(values: Iterable[V], short: Callable[[V], bool], stand_in: str) -> list[Any]:
    """Return the parameters of a sweep: those that are not `short` are long.

    `stand_in` is the test that keeps the promise in small, mostly the same one with short values.
    """
    given = list(values)
    assert any(short(value) for value in given), "a sweep has short values"
    mark = getattr(pytest.mark, LONG)(stand_in)
    return [value if short(value) else _param(value, mark) for value in given]


def thin(items: Sequence[pytest.Item]) -> None:
    """Make long what `every(n)` leaves out: of each test's parameters all but every n-th.

    Long ones may take longer than others.
    """
    seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            if seen[name] % mark.args[0]:
                item.add_marker(getattr(pytest.mark, LONG)(name))
            seen[name] += 1
        if item.get_closest_marker(LONG) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONGEST_S))


def _param(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark)


@dataclass(frozen=True)
class Named:
    """One place that makes tests long: where it is, and the test that it names ("": none)."""

    where: str
    stand_in: str


def named(path: Path, root: Path) -> Iterator[Named]:
    """Yield all places of a file that make tests long."""
    text = path.read_text(encoding="utf-8")
    if "mark.long" not in text and "sampled(" not in text:
        return
    tree = ast.parse(text)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        where = f"{path.relative_to(root).as_posix()}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and (_is_mark(node.func) or _is_sampled(node.func)):
            said = node.args[-1] if node.args else None
            value = said.value if isinstance(said, ast.Constant) else None
            yield Named(where, value if isinstance(value, str) else "")
        elif _is_mark(node) and id(node) not in called:
            yield Named(where, "")


def is_quick(stand_in: str, root: Path) -> bool:
    """Return whether a test exists, and is not long as a whole."""
    name, _, test = stand_in.partition("::")
    if not (root / name).is_file():
        return False
    tree = ast.parse((root / name).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            marks: list[ast.AST] = [one for one in tree.body if _is_pytestmark(one)]
            marks += [one for one in node.decorator_list if not _is_parametrize(one)]
            return not any(_is_mark(part) for mark in marks for part in ast.walk(mark))
    return False


def _is_mark(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "long"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
    )


def _is_sampled(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "sampled"


def _is_pytestmark(node: ast.AST) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(one, ast.Name) and one.id == "pytestmark" for one in targets)


def _is_parametrize(node: ast.AST) -> bool:
    """Marks of single parameters are in there: the others are not long."""
    func = node.func if isinstance(node, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr == "parametrize"
