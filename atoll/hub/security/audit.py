"""Who did what: every request that changes something, every join and login, every refusal.

Rows are bounded in number. Refusals are bounded by themselves and in their rate, so that a stranger
who knocks all day cannot push out what people did.
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
"""Actions that are kept, about 20 MB."""

MAX_REFUSALS = 20_000

REFUSALS_PER_MINUTE = 10
"""Refusals of one address that are written down."""

REFUSALS_IN_ALL = 120
"""The same of all addresses together."""

_TIDY_EVERY = 500
"""Rows between two looks at how many there are."""

_LONGEST = 300
"""Characters of a field."""


class Audit:
    """The log of who did what."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        """Write into a table of this database."""
        self._database = database
        self._clock = clock
        self._each = RateLimit(clock, most=REFUSALS_PER_MINUTE, window_s=60.0)
        self._all = RateLimit(clock, most=REFUSALS_IN_ALL, window_s=60.0, sources=1)
        self._since_tidy = _TIDY_EVERY
        self.unwritten = 0
        """Refusals that were too many to be written down."""

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
        """Write one row; a database that fails is told in the log, and stops nobody.

        Args:
            identity: Who; None: a stranger.
            address: Network address.
            action: Method and kind of address, e.g. `POST /api/jobs/{job}/stop`.
            target: The address itself, without its query: a query may hold a token.
            outcome: HTTP status, or the error.
            refused: Whether it was not allowed.
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
        """Return the newest rows with an id above `after`, oldest first; `name`: of one alone."""

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
    """Delete the oldest rows beyond the bounds."""
    for refused, most in ((0, MAX_ROWS), (1, MAX_REFUSALS)):
        connection.execute(
            "DELETE FROM audit WHERE refused = ? AND id <= (SELECT id FROM audit WHERE refused = ?"
            " ORDER BY id DESC LIMIT 1 OFFSET ?)",
            (refused, refused, most),
        )
