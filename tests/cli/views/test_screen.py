"""Numbers for people."""

from __future__ import annotations

from pathlib import Path

import pytest

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
