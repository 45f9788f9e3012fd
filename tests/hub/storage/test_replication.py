"""A job's checkpoints are copied beside the hub, in the background and again after a restart."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.checkpoint import DirectoryStore, SavePoint
from atoll.checkpoint.stores.remote import Remote
from atoll.hub.app import HubOptions
from atoll.hub.server import HubServer
from atoll.hub.storage.replication import Replicator
from tests.checkpoint.savers import parts
from tests.hub.membership import until


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    options = HubOptions(data=tmp_path / "data", jobs=tmp_path / "runs", reducers=False)
    with HubServer(options) as server:
        yield server


def fill(folder: Path, round_: int) -> None:
    store = DirectoryStore(folder / "runs" / "job", keep=9)
    store.put(SavePoint(round_, 10 * round_, "w0", ["w0"]), parts(1.0))


def copies(hub: HubServer, folder: Path, command: tuple[str, ...] | None = None) -> Replicator:
    assert hub.hub is not None
    extra: dict[str, Any] = {"command": command} if command else {}
    events = hub.hub.stores.events
    return Replicator(events=events, folder=lambda job: folder / "runs" / job, **extra)


def events_in(hub: HubServer) -> list[tuple[str, str]]:
    assert hub.hub is not None
    events = hub.call(hub.hub.stores.events.read("job"))
    return [(str(event["kind"]), str(event["text"])) for event in events]


def wake(hub: HubServer, made: Replicator, url: str) -> None:
    async def on_the_loop() -> None:
        made.wake("job", url)

    hub.call(on_the_loop())


def test_what_is_complete_is_copied_and_told(hub: HubServer, tmp_path: Path) -> None:
    made, url = copies(hub, tmp_path), str(tmp_path / "elsewhere")
    fill(tmp_path, 1)
    wake(hub, made, url)
    until(lambda: Remote(url, job="job").rounds() == [1])
    fill(tmp_path, 2)
    wake(hub, made, url)
    wake(hub, made, url)
    until(lambda: [kind for kind, _ in events_in(hub)] == ["checkpoint-copied"] * 2)
    assert Remote(url, job="job").rounds() == [1, 2]
    hub.call(made.close())


def test_trouble_is_told_once_and_ends_with_the_hub(hub: HubServer, tmp_path: Path) -> None:
    made, url = copies(hub, tmp_path), tmp_path / "elsewhere"
    url.write_text("a file where a folder should be")
    fill(tmp_path, 1)
    wake(hub, made, str(url))
    until(lambda: len(events_in(hub)) == 1)
    assert events_in(hub)[0][0] == "checkpoint-copy-failed"
    hub.call(made.close())
    url.unlink()
    successor = copies(hub, tmp_path)
    wake(hub, successor, str(url))
    until(lambda: Remote(str(url), job="job").rounds() == [1])
    hub.call(successor.close())


def test_program_that_is_missing_is_reported(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.storage.replication.FIRST_PAUSE_S", 0.01)
    program = tmp_path / "program"
    made = copies(hub, tmp_path, (str(program),))
    fill(tmp_path, 1)
    wake(hub, made, "x")
    until(lambda: [kind for kind, _ in events_in(hub)] == ["checkpoint-copy-failed"])
    assert "No such file" in events_in(hub)[0][1]
    program.write_text(f"#!{sys.executable}\nopen({str(tmp_path / 'mark')!r}, 'w')\n")
    program.chmod(0o755)
    until((tmp_path / "mark").exists)  # it is tried again
    hub.call(made.close())


def test_job_that_was_forgotten_at_once_is_copied_later(hub: HubServer, tmp_path: Path) -> None:
    made, url = copies(hub, tmp_path), str(tmp_path / "elsewhere")
    fill(tmp_path, 1)

    async def forgotten_at_once() -> None:
        made.wake("job", url)
        await made.forget("job")
        made.wake("job", url)

    hub.call(forgotten_at_once())
    until(lambda: Remote(url, job="job").rounds() == [1])
    hub.call(made.close())


def test_a_report_that_is_too_long_does_not_end_the_copying(hub: HubServer, tmp_path: Path) -> None:
    report = json.dumps({"type": "Copied", "round": 1, "nbytes": 5})
    code = f"print('x' * 10**6); print({report!r})"
    made = copies(hub, tmp_path, (sys.executable, "-c", code))
    fill(tmp_path, 1)
    wake(hub, made, "x")
    until(lambda: [kind for kind, _ in events_in(hub)] == ["checkpoint-copied"])
    hub.call(made.close())


def test_program_that_fails_is_started_again(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.hub.storage.replication.FIRST_PAUSE_S", 0.01)
    mark = tmp_path / "starts"
    code = f"open({str(mark)!r}, 'a').write('x'); raise SystemExit(1)"
    made = copies(hub, tmp_path, (sys.executable, "-c", code))
    fill(tmp_path, 1)
    wake(hub, made, "x")
    until(lambda: mark.exists() and len(mark.read_text()) >= 3)
    hub.call(made.close())
