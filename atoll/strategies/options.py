"""Options of outer strategies as their source says them: names, defaults, words. No torch.

The options are dataclasses in modules that import torch. Their fields are plain literals with a
string below each, so they can be read without running anything.
"""

from __future__ import annotations

import ast
import importlib.util
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from atoll.strategies.registry import OUTERS

_READING = threading.Lock()
"""One source at a time: CPython 3.11 parses wrongly on several threads at once."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of `[strategy]`."""

    name: str
    kind: str
    """Its type, as written."""
    default: Any
    line: str
    """What it means."""


@cache
def options_of(outer: str) -> tuple[Option, ...]:
    """Return the options of an outer strategy, by its name in the table.

    Raises:
        KeyError: there is no such strategy.
    """
    module, _, name = OUTERS[outer].partition(":")
    with _READING:
        return _fields(module, name)


def defaults_of(outer: str) -> Mapping[str, Any]:
    """Return option -> default of an outer strategy."""
    return {option.name: option.default for option in options_of(outer)}


def _fields(module: str, name: str) -> tuple[Option, ...]:
    """Return the fields of a dataclass in a module, those of its bases first."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise KeyError(module)
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (*_inherited(tree, node, module), *_own(node))
    raise KeyError(f"{module}:{name}")


def _inherited(tree: ast.Module, node: ast.ClassDef, module: str) -> tuple[Option, ...]:
    """Return the fields of the bases, which are in the same module or imported by name."""
    places = {
        alias.asname or alias.name: (imported.module or module, alias.name)
        for imported in tree.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    found: list[Option] = []
    for base in node.bases:
        if isinstance(base, ast.Name):
            place = places.get(base.id, (module, base.id))
            if place[0].startswith("atoll."):
                found += _fields(*place)
    return tuple(found)


def _own(node: ast.ClassDef) -> list[Option]:
    """Return the annotated fields of a class with the strings below them."""
    found: list[Option] = []
    for index, part in enumerate(node.body):
        if not isinstance(part, ast.AnnAssign) or not isinstance(part.target, ast.Name):
            continue
        kind = ast.unparse(part.annotation)
        if kind.startswith("ClassVar") or part.value is None:
            continue
        below = node.body[index + 1] if index + 1 < len(node.body) else None
        words = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            words = " ".join(str(below.value.value).split())
        found.append(Option(part.target.id, kind, _literal(part.value), words))
    return found


def _literal(value: ast.expr) -> Any:
    """Return the default, or how it is written where it is no literal."""
    try:
        return ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value)
