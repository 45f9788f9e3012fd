"""`atoll stop` ends no job that was not named, and prefixes work in every command."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.cli import hub_access
from atoll.cli import main as command
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.hub.membership import options
from tests.patience import PATIENCE_S

JOB = '[job]\nname = "{}"\ncommand = ["true"]\n'


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubClient]:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    with HubServer(options(tmp_path)) as hub, HubClient(hub.url, hub.operator_token) as made:
        hub_access.remember(hub_access.KnownHub(hub.url, hub.operator_token, operator=True))
        yield made


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        command.main(list(words))
    return int(leaving.value.code or 0)


def states(client: HubClient) -> dict[str, str]:
    return {str(view["job"]): str(view["state"]) for view in client.jobs(brief=True)}


def answered(word: str) -> int:
    """Run `atoll stop` on a terminal and answer its question."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "stop"], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.write(ours, f"{word}\n".encode())
        code = process.wait(PATIENCE_S)
    os.close(ours)
    return code


def test_job_that_was_not_named_is_not_stopped(
    client: HubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.submit(JOB.format("gpt"))
    assert run("stop") != 0
    assert f"atoll stop {job}" in capsys.readouterr().err
    assert answered("n") != 0
    assert states(client) == {job: "waiting"}
    assert answered("y") == 0
    assert states(client) == {job: "stopped"}
    assert run("stop") != 0
    assert "no job runs or waits" in capsys.readouterr().err


def test_prefix_names_a_job_in_every_command(
    client: HubClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = client.submit(JOB.format("gpt")), client.submit(JOB.format("gpt"))
    other = client.submit(JOB.format("demo"))
    client.stop(old, grace_s=0)
    assert run("scale", "gpt", "2") == 0
    assert f"{new}: 2 members" in capsys.readouterr().out
    for words in (("status", "demo"), ("logs", "demo"), ("worth", "demo")):
        assert run(*words) == 0, words
    assert run("collect", "demo", "--to", str(tmp_path / "here")) == 0
    assert run("stop", "gpt") == 0
    assert run("stop", "demo") == 0
    assert set(states(client).values()) == {"stopped"}
    capsys.readouterr()
    assert run("status", "gpt") != 0
    assert "2 jobs begin with 'gpt'" in capsys.readouterr().err
    assert run("rm", "demo", "--yes") == 0
    assert other not in states(client)
    assert run("resume", "gpx", "--detach") != 0
    assert "did you mean gpt-" in capsys.readouterr().err


def test_deletion_and_audit_fit_into_80_columns(
    client: HubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    job = client.submit(JOB.format("a-job-with-a-long-name"))
    client.stop(job, grace_s=0.0)
    assert run("rm", job) != 0
    output = capsys.readouterr()
    assert job in output.out
    assert "not a terminal; pass --yes to delete" in output.err
    assert run("audit") == 0
    output = capsys.readouterr()
    assert f"operator started {job}" in output.out
    assert max(map(len, output.out.splitlines())) <= 80


def test_missing_job_file_is_one_sentence(
    client: HubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("run", "nothing.toml") == 2
    output = capsys.readouterr().err
    assert "there is no such file" in output
    assert "nothing.toml" in output
    assert "Errno" not in output
