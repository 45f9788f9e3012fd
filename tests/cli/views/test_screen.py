"""Numbers for people, and texts of others on their terminals."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.live import Live
from rich.table import Table

from atoll.cli.views import screen


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (5e15, "5000.0 TB")],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert screen.size(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12"), (26400, "26.4 k"), (3.1e9, "3.1 G")])
def test_counts(number: float, text: str) -> None:
    assert screen.count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0:00"), (65.4, "1:05"), (3725, "1:02:05"), (-3, "0:00")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert screen.duration(seconds) == text


def test_paths_are_shown_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert screen.shown(tmp_path / "runs" / "a") == "runs/a"
    assert screen.shown(Path("/elsewhere")) == "/elsewhere"


HOSTILE = "\x1b[2J\x1b]52;c;ZXZpbA==\x07\x9b31m\u202egnp.exe\x08\x00 done"


def test_texts_of_others_command_no_terminal() -> None:
    file = io.StringIO()
    console = screen.HarmlessConsole(file=file, force_terminal=True, width=200, highlight=False)
    screen.log_line(console, {"text": HOSTILE}, name="w0\x1bc")
    table = Table("name")
    table.add_row(f"[bold]{HOSTILE}[/]")
    with Live(table, console=console, refresh_per_second=1):
        console.print(HOSTILE, style="red", markup=False)
    printed = file.getvalue()
    assert "\x1b[?25l" in printed, "the console's own commands pass"
    for forbidden in ("\x1b[2J", "\x1b]", "\x1bc", "\x9b", "\u202e", "\x08", "\x00", "\x07"):
        assert forbidden not in printed
    assert printed.count("\\x1b[2J\\x1b]52;c;ZXZpbA==") >= 3


def test_names_between_colons_are_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    screen.output().print("run :rocket: of lap:cat:3")
    assert capsys.readouterr().out == "run :rocket: of lap:cat:3\n"


@given(st.text())
def test_harmless_text_is_printable_and_else_unchanged(text: str) -> None:
    found = screen.harmless(text)
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in found)
    assert screen.harmless(found) == found
    assert not text.isprintable() or found == text
