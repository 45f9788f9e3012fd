"""How every benchmark reports: a table for people on stderr, one line of JSON on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def emit(result: Mapping[str, Any], table: Sequence[Mapping[str, Any]]) -> None:
    """Write a table to stderr and the result as the last line of stdout.

    Args:
        result: What a program reads; must be plain JSON.
        table: Rows with the same keys, which become the columns.
    """
    sys.stderr.write(render(table))
    sys.stderr.flush()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def render(table: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as aligned text; numbers to the right."""
    if not table:
        return ""
    names = list(table[0])
    cells = [[_cell(row[name]) for name in names] for row in table]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(names)]
    right = [isinstance(table[0][name], int | float) for name in names]
    lines = [names, ["-" * width for width in widths], *cells]
    return "".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        + "\n"
        for line in lines
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if 0 < abs(value) < 0.01 else f"{value:.3f}"
    return str(value)
