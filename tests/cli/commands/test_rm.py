"""`atoll rm` against a real hub: what it deletes, whom it asks, and what it refuses."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.cli import hub_access
from atoll.cli import main as command
from atoll.cli.commands.hub import _days
from atoll.cli.commands.rm import chosen
from atoll.errors import JobError
from atoll.hub.server import HubServer
from atoll.net.http.client import HubClient
from tests.hub.membership import options

COMMAND = '[job]\nname = "c"\ncommand = ["true"]\n'


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubClient]:
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    with HubServer(options(tmp_path)) as hub, HubClient(hub.url, hub.operator_token) as made:
        hub_access.remember(hub_access.KnownHub(hub.url, hub.operator_token, operator=True))
        yield made


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        command.main(["rm", *words])
    return int(leaving.value.code or 0)


def ended(client: HubClient, *, batch: str = "") -> str:
    job = client.submit(COMMAND, batch=batch)
    client.stop(job, grace_s=0)
    return job


def left(client: HubClient) -> set[str]:
    return {str(view["job"]) for view in client.jobs()}


def test_named_jobs_and_those_of_a_batch_go_and_no_others(
    client: HubClient, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named, stays = ended(client), ended(client)
    together = [ended(client, batch="four") for _ in range(2)]
    client.put_file(named, "out.bin", bytes(3_000_000))
    assert run(named, "--yes") == 0
    output = capsys.readouterr().out
    assert f"deleted {named} (3.0 MB)" in output
    assert "1 job, 3.0 MB" in output
    assert run("--batch", "four", "--yes", "--keep-files") == 0
    assert left(client) == {stays}
    assert (tmp_path / "runs" / together[0] / "job.toml").exists()
    assert not (tmp_path / "runs" / named).exists()


def test_one_that_has_not_ended_is_refused_and_nothing_goes(
    client: HubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    over, waits = ended(client), client.submit(COMMAND)
    assert run(over, waits, "--yes") != 0
    output = capsys.readouterr().err
    assert f"atoll stop {waits}" in output
    assert left(client) == {over, waits}
    assert run("nope", "--yes") != 0
    assert "no such job" in capsys.readouterr().err
    assert run("--yes") != 0
    assert "no jobs to delete" in capsys.readouterr().err


def test_without_a_terminal_deletion_needs_confirmation(
    client: HubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ended(client)
    assert run(job) != 0
    assert "not a terminal; pass --yes to delete" in capsys.readouterr().err
    assert left(client) == {job}


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are of POSIX")
@pytest.mark.parametrize(("said", "goes"), [(b"y\n", True), (b"\n", False)])
def test_on_a_terminal_a_person_is_asked(client: HubClient, said: bytes, *, goes: bool) -> None:
    job = ended(client)
    own, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", "rm", job], stdin=theirs, stdout=theirs, stderr=theirs,
        env=os.environ | {"TERM": "dumb"},
    )  # fmt: skip
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 60
    while b"Delete it?" not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(own, 4096)
    assert b"cannot be undone" in shown
    os.write(own, said)
    try:
        while os.read(own, 4096):
            continue
    except OSError:  # the other end is closed
        pass
    assert (process.wait(60) == 0) == goes
    os.close(own)
    assert (job in left(client)) != goes


def view(name: str, state: str, *, ended: float | None, batch: str = "") -> dict[str, Any]:
    return {"job": name, "state": state, "ended": ended, "batch": batch}


def test_what_is_meant_is_found_by_name_batch_and_age() -> None:
    views = [
        view("new", "done", ended=100.0), view("runs", "running", ended=None, batch="b"),
        view("old", "failed", ended=10.0, batch="b"), view("older", "done", ended=5.0),
    ]  # fmt: skip

    def names(*wanted: str, batch: str = "", before: float | None = None) -> list[str]:
        found = chosen(views, names=wanted, batch=batch, before=before)
        return [str(one["job"]) for one in found]

    assert names(before=50.0) == ["older", "old"]
    assert names("new", "older") == ["older", "new"]
    assert names(batch="b", before=50.0) == ["old"]  # one that runs has not ended before
    assert names("new", before=50.0) == []
    with pytest.raises(JobError, match="only jobs that have ended"):
        names(batch="b")


def test_days_of_retention_are_read_as_people_write_them() -> None:
    assert [_days(text) for text in ("", "30", "30d", "12h", "2w")] == [None, 30, 30, 0.5, 14]
