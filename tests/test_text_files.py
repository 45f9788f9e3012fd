"""Text files are the same bytes on every system."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPENING = ("open", "fdopen", "NamedTemporaryFile", "TemporaryFile")


def name_of(called: ast.expr) -> str:
    """Return the last word of what is called."""
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def mode_of(call: ast.Call) -> str | None:
    """Return the mode in which a call opens a file; None: it opens none, or not as text."""
    given = [*call.args, *(one.value for one in call.keywords if one.arg == "mode")]
    texts = [str(one.value) for one in given if isinstance(one, ast.Constant)]
    modes = [text for text in texts if text and set(text) <= set("rwxabt+")]
    builtin = isinstance(call.func, ast.Name) and call.func.id == "open"
    return next(iter(modes), "r" if builtin else None)


def missing(source: str, *, newline: bool) -> Iterator[str]:
    """Yield the calls that read or write text and do not say how."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call):
            continue
        said, name = {one.arg for one in call.keywords}, name_of(call.func)
        passed = [name_of(one) for one in call.args if isinstance(one, ast.Attribute)]
        texts = {"read_text", "write_text"} & {*passed, name}
        if isinstance(call.func, ast.Name) and name in texts:
            continue  # a function of that name
        writes = "write_text" in texts
        if name in OPENING:
            mode = mode_of(call)
            if mode is None or "b" in mode:
                continue
            writes = not mode.startswith("r")
        elif not texts:
            continue
        positional = len(call.args) >= (2 if name == "write_text" else 1) and name in texts
        encoded = "encoding" in said or positional
        if not encoded or (newline and writes and "newline" not in said):
            yield f"{call.lineno}: {ast.unparse(call)[:80]}"


@pytest.mark.parametrize("folder", ["atoll", "bench", "examples"])
def test_text_is_utf_8_and_its_lines_end_alike(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{one}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for one in missing(path.read_text(encoding="utf-8"), newline=folder == "atoll")
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", True),
        ("path.write_text(text, 'utf-8', newline='\\n')", False),
        ("run(path.write_text, text, encoding='utf-8')", True),
        ("path.open('a', encoding='utf-8')", True),
        ("open(path)", True),
        ("open(path, encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("os.open(path, os.O_RDWR)", False),
        ("write_text(model)", False),
    ],
)
def test_calls_that_do_not_say_how_are_found(source: str, wrong: bool) -> None:
    assert bool(list(missing(source, newline=True))) is wrong
