"""Logins of browsers that end while they begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.clock import VirtualClock
from atoll.hub.db.database import Database
from atoll.hub.security.browser_logins import KEPT_S, SCHEMA, BrowserLogins


def test_a_login_revoked_while_it_begins_stays_so(tmp_path: Path) -> None:
    database, clock = Database(tmp_path / "hub.sqlite", schemas=[SCHEMA]), VirtualClock()

    async def revoke_meanwhile() -> str:
        logins = BrowserLogins(database, clock=clock)
        await logins.begin("member", "ann")
        clock.advance(KEPT_S)  # the first has expired: the next deletes it before it is written
        beginning = asyncio.ensure_future(logins.begin("member", "ann"))
        await asyncio.sleep(0)
        await logins.end_all("member", "ann")
        secret = await beginning
        assert logins.find(secret) is None
        kept = await logins.begin("member", "ann")
        assert BrowserLogins(database, clock=clock).find(kept) == ("member", "ann")
        return secret

    secret = asyncio.run(revoke_meanwhile())
    assert BrowserLogins(database, clock=clock).find(secret) is None
    database.close()
