"""What `atoll run` says of keys that the planner answers."""

from __future__ import annotations

import io

from rich.console import Console

from atoll.cli.jobs.jobfile import Overrides, parse_text
from atoll.cli.planning.choose import _default


def test_names_of_tables_are_no_markup() -> None:
    console = Console(file=io.StringIO(), width=200)
    submission = parse_text('[strategy]\nevery = "auto"\n', Overrides(), name="x")
    _default(submission, "a node has no speed (nodes in [job])", console)
    assert isinstance(console.file, io.StringIO)
    assert "nodes in [job]" in console.file.getvalue()
