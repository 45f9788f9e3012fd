"""Audit log: every changing request, join, login and refusal.

Refusals have their own bound and rate limit, so that a flood of them cannot displace other rows.
"""

from __future__ import annotations

import logging
import sqlite3
from typing import Any

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.db.database import Database
from atoll.hub.security.auth import Identity
from atoll.hub.security.connection_limits import RateLimit

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, role TEXT NOT NULL,
    name TEXT NOT NULL, address TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL,
    outcome TEXT NOT NULL, refused INTEGER NOT NULL
);
"""

MAX_ROWS = 100_000
"""Rows kept that are not refusals, about 20 MB."""

MAX_REFUSALS = 20_000

REFUSALS_PER_MINUTE = 10
"""Refusals recorded per address and minute."""

REFUSALS_IN_ALL = 120
"""The same over all addresses."""

_TIDY_EVERY = 500
"""Rows written between two deletions of old rows."""

_LONGEST = 300


class Audit:
    """The audit log of a hub."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._each = RateLimit(clock, most=REFUSALS_PER_MINUTE, window_s=60.0)
        self._all = RateLimit(clock, most=REFUSALS_IN_ALL, window_s=60.0, sources=1)
        self._since_tidy = _TIDY_EVERY
        self.unwritten = 0

    async def note(
        self,
        identity: Identity | None,
        *,
        address: str,
        action: str,
        target: str,
        outcome: str,
        refused: bool = False,
    ) -> None:
        """Write one row; a database error is logged and not raised.

        Args:
            identity: None: not authenticated.
            address: Network address of the client.
            action: Method and route, e.g. `POST /api/jobs/{job}/stop`.
            target: Path without query, which may hold a token.
            outcome: HTTP status, or the error.
            refused: Whether access was denied.
        """
        if refused:
            if self._each.reached(address) or self._all.reached("all"):
                self.unwritten += 1
                return
            self._each.note(address)
            self._all.note("all")
        role, name = (identity.role, identity.name) if identity else ("", "")
        texts = [text[:_LONGEST] for text in (role, name, address, action, target, outcome)]
        now = self._clock.wall()
        self._since_tidy += 1
        tidy = self._since_tidy >= _TIDY_EVERY
        if tidy:
            self._since_tidy = 0

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO audit (time, role, name, address, action, target, outcome, refused)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (now, *texts, refused),
            )
            if tidy:
                _tidy(connection)

        try:
            await self._database.write(write)
        except AtollError as error:
            log.error("the audit log cannot be written: %s", error)

    async def read(
        self, *, after: int = 0, limit: int = 1_000, name: str = ""
    ) -> list[dict[str, Any]]:
        """Return the newest rows with an id above `after`, oldest first; `name` filters them."""

        def read(connection: sqlite3.Connection) -> list[dict[str, Any]]:
            rows = connection.execute(
                "SELECT id, time, role, name, address, action, target, outcome FROM audit"
                " WHERE id > ? AND (? = '' OR name = ?) ORDER BY id DESC LIMIT ?",
                (after, name, name, limit),
            ).fetchall()
            keys = ("id", "time", "role", "name", "address", "action", "target", "outcome")
            return [dict(zip(keys, row, strict=True)) for row in reversed(rows)]

        return await self._database.read(read)


def _tidy(connection: sqlite3.Connection) -> None:
    for refused, most in ((0, MAX_ROWS), (1, MAX_REFUSALS)):
        connection.execute(
            "DELETE FROM audit WHERE refused = ? AND id <= (SELECT id FROM audit WHERE refused = ?"
            " ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (refused, refused, most),
        )
