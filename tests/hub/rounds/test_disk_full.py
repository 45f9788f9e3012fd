"""Rounds at a hub of which the disk fills up, and empties again."""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from pathlib import Path

import pytest

from atoll.errors import StorageFull
from atoll.hub.http.views import job_view
from atoll.hub.server import HubServer
from atoll.wire.message import Message
from atoll.wire.messages import RoundJoin, RoundPlan, Verdict
from tests.hub.nodes.test_membership import Running, job_of, until, vote

ENOUGH_ROUNDS = 2_000
"""Each round needs some bytes of the last page of a table."""


def limit_pages(hub: HubServer, *, more: int) -> None:
    """Let the hub's database grow by this many pages only, as on a full disk."""

    def limit(connection: sqlite3.Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages + more}")

    assert hub.hub is not None
    hub.call(hub.hub.stores.database.write(limit))


def answered(running: Running, body: Message) -> Message | None:
    """Return the first member's answer; None as soon as the hub says that its disk is full."""
    ids = [peer.ask(body) for peer in running.members]
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
    for round_ in range(ENOUGH_ROUNDS):
        plan = answered(running, RoundJoin(round_, "base"))
        if not isinstance(plan, RoundPlan) or answered(running, vote(plan)) is None:
            break
    record = job_of(hub, running.job)
    view = job_view(record, latest={}, live={})
    assert view["paused"]
    assert "no room is left" in view["paused_reason"]
    assert "free some space" in view["paused_reason"]
    limit_pages(hub, more=1_000_000)
    until(lambda: not trouble(running))
    plan = answered(running, RoundJoin(record.committed_round, "base"))
    assert isinstance(plan, RoundPlan), plan
    verdict = answered(running, vote(plan))
    assert isinstance(verdict, Verdict), verdict
    assert verdict.committed
    assert not job_view(job_of(hub, running.job), latest={}, live={})["paused"]


def test_full_disk_under_a_file_beside_the_database_is_named(hub: HubServer) -> None:
    assert hub.hub is not None

    def write(_: sqlite3.Connection) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageFull, match="free some space"):
        hub.call(hub.hub.stores.database.write(write))
    assert Path(hub.hub.stores.database.path).exists()
