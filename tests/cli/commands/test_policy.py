"""`atoll policy`, and what `atoll join` shows of it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from atoll.cli.main import main
from atoll.cli.views.node_line import NodeLine
from atoll.node.agent.options import Status
from atoll.node.availability.policy import OwnerPolicy


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_what_is_in_force_and_whether_it_pauses_now_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('cores = 2\nquiet_hours = ["00:00-24:00"]\n')
    assert run("policy", "--home", str(tmp_path)) == 0
    shown = capsys.readouterr().out
    assert "at most 2 cores" in shown
    assert "paused: quiet hours until" in shown
    file.write_text("cores = 2\n")
    assert run("policy", "--policy", str(file)) == 0
    assert "takes work" in capsys.readouterr().out


def test_a_machine_without_a_policy_gives_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("policy", "--home", str(tmp_path)) == 0
    assert "nothing is limited" in capsys.readouterr().out


def test_a_mistake_is_shown_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.toml").write_text("\ncorse = 2\n")
    assert run("policy", "--home", str(tmp_path)) == 2
    shown = capsys.readouterr().err
    assert "line 2" in shown
    assert "did you mean 'cores'?" in shown


def test_node_line_shows_its_policy_and_why_it_pauses() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    with NodeLine(console, hub="http://h:1", policy=OwnerPolicy(cores=2, nice=3)) as line:
        line.ready("sofa")
        status = Status(
            node="sofa", connected=True, running=[], sent_bytes=0, received_bytes=0,
            draining="on battery", paused="on battery",
            policy=("at most 2 cores", "work runs at niceness 3"), computes_on="processor",
            idle="RTX 3060 is idle: its driver is missing",
        )  # fmt: skip
        line.show(status)
        line.show(dataclasses.replace(status, policy=("at most 1 cores",), paused="", draining=""))
    shown = out.getvalue()
    assert shown.count("policy: at most 2 cores; work runs at niceness 3") == 1
    assert "sofa: paused: on battery; idle" in shown
    assert shown.count("computes on: processor\n") == 1
    assert shown.count("note RTX 3060 is idle: its driver is missing\n") == 1
    assert "policy: at most 1 cores\n" in shown
    assert "sofa: idle, waiting for a job" in shown
