"""Commands in the process of the tests: one of their own costs half a second, with torch two.

What a command starts itself, signals and terminals need a process (`tests/e2e/conftest.py`).
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from atoll.cli.main import main


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def both(self) -> str:
        """What it printed, for searching; line breaks of the terminal's width are not there."""
        return self.out + self.err


def run_here(*words: str, environment: Mapping[str, str], folder: Path) -> Done:
    """Run `atoll WORDS` with these variables, and no others, in a folder."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment, clear=True), contextlib.chdir(folder),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):  # fmt: skip
        main(list(words))
    return Done(int(str(ended.value.code or 0)), out.getvalue(), err.getvalue())
