"""Secrets in what a process prints."""

from __future__ import annotations

import io
from collections import deque
from pathlib import Path

import pytest

from atoll.config import parse_spec
from atoll.config.redaction import Redaction
from atoll.errors import ConfigError
from atoll.node.processes.output import read_output

KEY = "sk-0123456789abcdef"
PEM = "-----BEGIN KEY-----\nMIIEvQIBADANBg\nshort\n-----END KEY-----"


def test_values_and_their_lines_are_replaced() -> None:
    hide = Redaction({"KEY": KEY, "LONGER": KEY + "-more", "PEM": PEM})
    assert hide(f"a {KEY} b {KEY}-more") == "a (secret KEY) b (secret LONGER)"
    assert hide(PEM) == "(secret PEM)"
    assert hide("> MIIEvQIBADANBg") == "> (secret PEM)"
    assert hide("a short line") == "a short line"
    assert hide.fields({"what": f"401: {KEY}"}) == {"what": "401: (secret KEY)"}


def test_output_has_no_values_in_lines_tail_or_file(tmp_path: Path) -> None:
    """Not in a line without an end either, nor in two parts of one line."""
    lines: list[str] = []
    tail: deque[str] = deque()
    stream = io.BufferedReader(io.BytesIO(f"one\nkey={KEY}\n50%\rlast {KEY}".encode()), 7)
    path = tmp_path / "output.log"
    read_output(stream, path, lines.append, tail, hide=Redaction({"KEY": KEY}))
    expected = ["one", "key=(secret KEY)", "50%", "last (secret KEY)"]
    assert lines == list(tail) == path.read_text().splitlines() == expected


@pytest.mark.parametrize(
    ("entry", "kind"),
    [("HF_TOKEN", "trainer"), ("HF_TOKEN=TEAM_KEY", "trainer"), ("LD_PRELOAD=TEAM_KEY", "script")],
)
def test_variables_that_load_code_need_trust(entry: str, kind: str) -> None:
    assert parse_spec(f'[launch]\nsecrets = ["{entry}"]\n').permission == kind


@pytest.mark.parametrize("entry", ["", "A=", "=A", "A B", "ATOLL_TOKEN=A", "A=B=C"])
def test_wrong_entries_are_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"entry of secrets in \[launch\]"):
        parse_spec(f'[launch]\nsecrets = ["{entry}"]\n')
