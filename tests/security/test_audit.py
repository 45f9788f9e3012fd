"""The audit log: every change, join, login and refusal, with who did it, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.clock import VirtualClock
from atoll.errors import AuthError
from atoll.hub.db.database import Database
from atoll.hub.security import audit as audit_module
from atoll.hub.security.audit import (
    MAX_REFUSALS,
    REFUSALS_IN_ALL,
    REFUSALS_PER_MINUTE,
    SCHEMA,
    Audit,
)
from atoll.hub.security.auth import Identity
from atoll.hub.server import HubServer
from atoll.net.endpoint import parse_ticket
from tests.hub.peer import Peer
from tests.security.conftest import INFO, SPEC, login, operator, serving, until, web


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with serving(tmp_path_factory.mktemp("hub")) as server:
        yield server


def rows_of(hub: HubServer, **asked: Any) -> list[dict[str, Any]]:
    with operator(hub) as client:
        return client.audit(**asked)


def last(hub: HubServer) -> tuple[str, str, str, str, str]:
    row = rows_of(hub)[-1]
    return row["role"], row["name"], row["action"], row["target"], row["outcome"]


def test_changes_are_written_down_with_who_made_them(hub: HubServer) -> None:
    with operator(hub) as client:
        job = client.submit(SPEC)
        assert last(hub) == (*["operator"] * 2, "submit", f"POST /api/jobs/{job}", "201")
        client.stop(job, grace_s=0.0)
        assert last(hub)[2:] == ("stop", f"POST /api/jobs/{job}/stop", "200")
        before = len(rows_of(hub))
        client.jobs()
        client.put_file(job, "a", b"x")
        assert len(rows_of(hub)) == before, "looking is no change, and data is no action"
    row = rows_of(hub)[-1]
    assert row["address"] == "127.0.0.1"
    assert row["time"] > 1e9


def test_joins_and_logins_carry_the_name_that_came_in(hub: HubServer) -> None:
    with operator(hub) as client:
        client.join(parse_ticket(hub.ticket).secret, name="kitchen", info=INFO)
    assert last(hub) == ("node", "kitchen", "join", "POST /api/join", "201")
    login(hub, "viewer", name="vera")
    assert last(hub) == ("viewer", "vera", "log in", "POST /api/login", "201")
    with web(hub) as browser:
        browser.get("/", params={"token": hub.operator_token})
    assert last(hub)[:2] == ("operator", "operator")
    assert "token" not in str(rows_of(hub)), "no secret, no query of an address"


def test_refusals_are_written_down(hub: HubServer) -> None:
    vera = login(hub, "viewer", name="viola")
    with web(hub, vera) as viewer:
        viewer.post("/api/jobs", json={})
    assert last(hub) == ("viewer", "viola", "submit", "POST /api/jobs", "403")
    with web(hub, "guess") as stranger:
        stranger.get("/api/jobs")
    assert last(hub) == ("", "", "refused", "GET /api/jobs", "401")
    with pytest.raises((AuthError, Exception)), Peer(hub, "job/w0", token="guess") as peer:
        peer.read(0.0)
    found = until(lambda: [row for row in rows_of(hub) if row["action"] == "session"])
    assert found[-1]["target"] == "job/w0"
    named = rows_of(hub, name="viola")
    assert {row["name"] for row in named} == {"viola"}


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(tmp_path / "hub.sqlite", schemas=[SCHEMA])
    yield opened
    opened.close()


def refusal(audit: Audit, address: str) -> Any:
    return audit.note(None, address=address, action="x", target="y", outcome="401", refused=True)


def test_a_stranger_who_knocks_all_day_writes_little(database: Database) -> None:
    clock = VirtualClock()
    audit = Audit(database, clock=clock)

    async def work() -> None:
        for _ in range(100):
            await refusal(audit, "1.1.1.1")
        assert len(await audit.read()) == REFUSALS_PER_MINUTE
        for number in range(1_000):
            await refusal(audit, f"10.0.0.{number}")
        assert len(await audit.read()) == REFUSALS_IN_ALL
        assert audit.unwritten == 1_100 - REFUSALS_IN_ALL
        clock.advance(61.0)
        await refusal(audit, "1.1.1.1")
        assert len(await audit.read()) == REFUSALS_IN_ALL + 1

    asyncio.run(work())


def test_rows_are_bounded_and_refusals_push_no_action_out(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "MAX_ROWS", 20)
    monkeypatch.setattr(audit_module, "MAX_REFUSALS", 10)
    monkeypatch.setattr(audit_module, "_TIDY_EVERY", 5)
    clock = VirtualClock()
    audit = Audit(database, clock=clock)

    async def work() -> None:
        who = Identity("operator", "olga")
        for number in range(50):
            await audit.note(who, address="a", action=f"{number}", target="t", outcome="200")
        for _ in range(100):
            clock.advance(10.0)
            await refusal(audit, "1.1.1.1")
        rows = await audit.read()
        kept = [row["action"] for row in rows if row["outcome"] == "200"]
        assert 20 <= len(kept) <= 25
        assert kept[-1] == "49"
        assert 10 <= len(rows) - len(kept) <= 15

    asyncio.run(work())
    assert MAX_REFUSALS < audit_module.MAX_ROWS or audit_module.MAX_ROWS == 20


def test_long_fields_are_cut(database: Database) -> None:
    audit = Audit(database, clock=VirtualClock())

    async def work() -> None:
        await audit.note(None, address="a", action="x" * 10_000, target="y" * 10_000, outcome="1")
        (row,) = await audit.read()
        assert len(row["action"]) == len(row["target"]) == 300

    asyncio.run(work())
