"""The command as a whole: help, exit statuses, one readable message per error."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli import main as command
from tests.patience import PATIENCE_S, PROMPT_S

VERBS = [
    *("up", "demo", "hub", "join", "run", "status", "logs", "stop", "resume"),
    *("generate", "report", "ticket", "doctor", "checkpoint"),
]


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        command.main(list(words))
    return int(leaving.value.code or 0)


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    shown = capsys.readouterr().out
    assert all(verb in shown for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    shown = capsys.readouterr().out
    assert "Usage" in shown
    assert "[]" not in shown, "the name of a table was taken for markup"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from atoll.cli import main\n"
        "try: main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'httpx', 'uvicorn', 'starlette'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - begun < PROMPT_S


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.startswith("atoll ")


def test_unknown_verb_and_option_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rum") == 2
    assert run("demo", "--nodse", "3") == 2
    assert "No such" in capsys.readouterr().err


def test_error_is_one_message_with_its_four_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.toml"
    job.write_text("[train]\nstep = 5\n")
    assert run("run", str(job), "--local", "1") == 2
    shown = capsys.readouterr().err
    assert "unknown key in [train]" in shown
    assert "'step'" in shown
    assert "expected:" in shown
    assert "did you mean 'steps'" in shown
    assert "Traceback" not in shown


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("run", "nothing.yaml", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_surprise_is_short_and_says_where_its_traceback_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path))
    monkeypatch.setattr("atoll.cli.hub_access.find", lambda where, without="": 1 / 0)
    assert run("status") == 70
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "last-error.log" in shown
    assert "Traceback" in (tmp_path / "last-error.log").read_text()
    assert "Traceback" not in shown


@pytest.mark.parametrize("wrapped", [False, True])
def test_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    def interrupted(where: str) -> None:
        if wrapped:  # Python 3.11 does so when a class is created, e.g. while torch is imported
            raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr("atoll.cli.hub_access.find", interrupted)
    assert run("status") == 130


def test_wrong_ticket_form_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("join", "http://somewhere") == 2
    assert "atoll://HOST:PORT/SECRET" in capsys.readouterr().err


def test_generate_without_a_model_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", str(tmp_path)) == 2
    assert "no trained model" in capsys.readouterr().err


def test_report_of_something_else_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", str(tmp_path)) == 2
    assert "summary.json" in capsys.readouterr().err


def test_command_that_computes_says_that_torch_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An empty entry makes the import fail as where torch is not installed."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "atoll.devices.choose", raising=False)
    assert run("generate", str(tmp_path)) == 2
    shown = capsys.readouterr().err
    assert "pip install 'atoll[train]'" in shown
    assert "bug" not in shown


def test_a_negative_number_of_lines_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("logs", "--lines", "-5") == 2
    assert "--lines" in capsys.readouterr().err
