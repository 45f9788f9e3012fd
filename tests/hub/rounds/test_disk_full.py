"""Rounds at a hub of which the disk fills up, and empties again."""

from __future__ import annotations

import contextlib
import errno
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import StorageFull
from atoll.hub.http.views import job_view
from atoll.hub.observability.events import append_lines
from atoll.hub.server import HubServer
from atoll.wire.job_messages import FOUND_ROOM, WAITS_FOR_ROOM
from atoll.wire.message import Message
from atoll.wire.messages import Beat, Event, Finished, RoundJoin, RoundPlan, Verdict
from tests.hub.membership import (
    Running,
    event_texts,
    job_of,
    launches,
    options,
    until,
    vote,
)
from tests.small_disk import fill, small_disk

ENOUGH_ROUNDS = 2_000
"""Each round needs some bytes of the last page of a table."""

DISK_BYTES = 8 * 2**20
"""Of a disk for one hub; its database and write-ahead log need about 1 MB."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of a small disk of its own, in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder, nbytes=DISK_BYTES):
        yield folder


def run_until_full(running: Running) -> int:
    """Commit rounds until they wait for the hub's disk; return the first member's open request.

    The second member's request is the one under which the hub writes.
    """
    for round_ in range(ENOUGH_ROUNDS):
        ids = ask(running, RoundJoin(round_, "base"))
        plan = answered(running, ids)
        if isinstance(plan, RoundPlan):
            ids = ask(running, vote(plan))
        if plan is None or answered(running, ids) is None:
            break
    assert "no room is left" in trouble(running)
    return ids[0]


def limit_pages(hub: HubServer, *, more: int) -> None:
    """Let the hub's database grow by this many pages only, as on a full disk."""

    def limit(connection: sqlite3.Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + more}")

    assert hub.hub is not None
    hub.call(hub.hub.stores.database.write(limit))


def ask(running: Running, body: Message) -> list[int]:
    """Let all members ask, each when the hub has received the request of the one before."""
    assert running.hub.hub is not None
    machine = running.hub.hub.rounds.machine(running.job)

    def arrived() -> bool:
        attempt = machine.attempt
        return "w0" in (machine.joins if attempt is None else attempt.votes)

    ids = []
    for peer in running.members:
        ids.append(peer.ask(body))
        if len(ids) < len(running.members):
            until(arrived)
    return ids


def answered(running: Running, ids: list[int]) -> Message | None:
    """Return the first member's answer; None as soon as the hub says that its disk is full."""
    found: list[Message] = []
    for peer, id in zip(running.members, ids, strict=True):
        while not trouble(running):
            with contextlib.suppress(TimeoutError):
                found.append(peer.answer(id, timeout_s=0.1))
                break
    return None if trouble(running) else found[0]


def trouble(running: Running) -> str:
    return job_of(running.hub, running.job).trouble


def test_rounds_wait_for_room_and_the_status_says_so(running: Running) -> None:
    hub = running.hub
    limit_pages(hub, more=0)
    run_until_full(running)
    record = job_of(hub, running.job)
    view = job_view(record, latest={}, live={})
    assert view["paused"]
    assert "no room is left" in view["paused_reason"]
    assert "free some space" in view["paused_reason"]
    limit_pages(hub, more=1_000_000)
    until(lambda: not trouble(running))
    plan = running.plan(record.committed_round)
    verdict = answered(running, ask(running, vote(plan)))
    assert isinstance(verdict, Verdict), verdict
    assert verdict.committed
    assert not job_view(job_of(hub, running.job), latest={}, live={})["paused"]


def test_members_lost_on_a_full_disk_come_back(
    disk: Path,
) -> None:
    """The loss and the new launch are known to the hub, but cannot be stored, for a while."""
    with HubServer(options(disk)) as hub:
        running = Running(hub)
        filler = fill(disk)
        waiting = run_until_full(running)
        running.members[1].close()
        until(lambda: job_of(hub, running.job).members["w1"].attempt == 2, "a new one is chosen")
        assert job_view(job_of(hub, running.job), latest={}, live={})["paused"]
        running.members[0].tell(Beat())
        running.agent.tell(Beat())
        filler.unlink()
        again = launches(running.agent, 1)
        assert list(again) == ["w1"], "it is launched again by itself"
        assert again["w1"].attempt == 2
        answer = running.members[0].answer(waiting)
        assert isinstance(answer, RoundPlan | Verdict), "what the lost one had begun is completed"
        until(lambda: not trouble(running))
        running.close()


def test_job_with_a_trained_model_that_finds_no_room_is_paused(running: Running) -> None:
    """A member says at every try that it waits: one event, until it found room or is gone."""

    def view() -> dict[str, Any]:
        return job_view(job_of(running.hub, running.job), latest={}, live={})

    waits = Event(WAITS_FOR_ROOM, "model.safetensors waits for room on the hub's disk")
    for _ in range(3):
        running.members[0].request(waits)
    assert view()["paused"]
    assert view()["paused_reason"] == (
        "no room is left on the hub's disk for what box (w0) trained: free some space there; "
        "it is kept, and stored then"
    )
    assert len(event_texts(running.hub, running.job, WAITS_FOR_ROOM)) == 1
    running.members[0].request(Event(FOUND_ROOM, "model.safetensors is stored"))
    assert not view()["paused"]
    running.members[0].request(waits)
    assert view()["paused"]
    running.members[0].request(Finished(ok=True))
    assert not view()["paused"]


def test_lines_on_a_full_disk_are_whole(disk: Path) -> None:
    path = disk / "events.jsonl"
    append_lines(path, [{"id": 1, "text": "before"}])
    filler = fill(disk)
    with pytest.raises(OSError, match="No space left"):  # part of it still fits into a page
        append_lines(path, [{"id": 2, "text": "x" * 3 * 4096}])
    filler.unlink()
    append_lines(path, [{"id": 2, "text": "after"}])
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == [
        "before",
        "after",
    ]


def test_full_disk_under_a_file_beside_the_database_is_named(hub: HubServer) -> None:
    assert hub.hub is not None

    def write(_: sqlite3.Connection) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFull, match="free some space"):
        hub.call(hub.hub.stores.database.write(write))
    assert Path(hub.hub.stores.database.path).exists()
