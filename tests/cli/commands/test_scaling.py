"""`atoll scaling fit`: what it prints, keeps and refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from atoll.cli.commands.scaling import parse_settings
from atoll.cli.main import _run
from atoll.errors import ConfigError
from atoll.scaling.points import Point
from atoll.scaling.saved import read_fit
from tests.scaling.worlds import world

FAST = ("--resamples", "20")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print as on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")


def write(path: Path, points: list[Point]) -> Path:
    """Write a table of points."""
    names = ("name", "params", "tokens", "members", "every", "loss", "batch")
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(names)
        table.writerows([getattr(point, name) for name in names] for point in points)
    return path


@pytest.mark.usefixtures("wide")
def test_the_law_its_checks_and_answers_fit_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "p.csv", world(noise=0.002))
    options = ["--predict", "params=5e10,tokens=2e10", "--budget", "1e20"]
    assert _run(["scaling", "fit", str(path), *FAST, *options], debug=False) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    said = " ".join(out.split())
    assert "L(N, D) = E + A / N^a + B / D^b" in said
    assert "a run that was left out is predicted to 0." in said
    assert "the largest params (1e+09, 5 x the next), held out:" in said
    assert "params 5e+10, tokens 2e+10: loss 2.2" in said
    assert "an extrapolation beyond 10 x, the interval is widened" in said
    assert "1e+20 FLOPs: params" in said


def test_json_has_all_figures_and_the_law_can_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "p.csv", world()), tmp_path / "law"
    words = ["scaling", "fit", str(path), *FAST, "--json", "--out", str(out)]
    assert (
        _run([*words, "--predict", "params=2e9,tokens=4e10", "--budget", "1e20"], debug=False) == 0
    )
    output = json.loads(capsys.readouterr().out)
    assert output["law"]["equation"] == "L = E + A / N^a + B / D^b"
    assert output["constants"]["a"] == pytest.approx(0.3478, rel=0.01)
    assert set(output["intervals_90"]) == {"E", "A", "B", "a", "b"}
    assert output["predictions"][0]["beyond"] == {"params": 2.0, "tokens": 2.0}
    assert output["budgets"][0]["params"] > 1e8

    kept = read_fit(out / "scaling.json")
    assert kept.theta == output["theta"]
    page = (out / "scaling.html").read_text("utf-8")
    assert "E + A / N^a + B / D^b" in page
    assert "<svg" in page
    assert "<script src" not in page

    again = ["scaling", "fit", str(out / "scaling.json"), "--json"]
    assert _run([*again, "--predict", "params=2e9,tokens=4e10"], debug=False) == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == output["predictions"]


@pytest.mark.parametrize(
    ("points", "words", "said"),
    [
        (world(sizes=(1e7,)), ["--law", "params,tokens"], "do not differ enough in params"),
        (world()[:2], ["--law", "tokens"], "at least 3 runs"),
        (world(), ["--law", "params,width"], "width"),
        (world(), ["--predict", "params=lots"], "these settings cannot be read"),
        (world(), ["--predict", "params=1e6"], "needs a value for tokens"),
        (world(), ["--budget", "-1"], "budget must be a positive number"),
    ],
)
def test_what_cannot_be_answered_is_said_with_a_remedy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    points: list[Point],
    words: list[str],
    said: str,
) -> None:
    path = write(tmp_path / "p.csv", points)
    assert _run(["scaling", "fit", str(path), *FAST, *words], debug=False) in (1, 2)
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_folders_without_a_finished_run_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["scaling", "fit", str(tmp_path)], debug=False) == 1
    assert "summary.json is missing" in capsys.readouterr().err


def test_a_damaged_law_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[]", '{"version": 9}', '{"version": 1, "law": {}}'):
        path = tmp_path / "scaling.json"
        path.write_text(text, encoding="utf-8")
        assert _run(["scaling", "fit", str(path)], debug=False) == 2
        assert "fitted law" in capsys.readouterr().err


def test_settings_are_names_with_numbers() -> None:
    assert parse_settings("params=1e6, tokens=2e7") == {"params": 1e6, "tokens": 2e7}
    for text in ("params", "params=", "=3", "params=1,params=2", ""):
        with pytest.raises(ConfigError, match="cannot be read"):
            parse_settings(text)
