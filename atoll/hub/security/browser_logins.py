"""Logins of browsers: what a dashboard's cookie holds instead of a token.

Browsers send a cookie to every port of a host, so other programs of that machine may read it. It
therefore holds a secret of its own, which is good for the dashboard only and ends after 30 days, at
the logout, or when the login that made it is revoked.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.hub.db.database import Database
from atoll.ids import new_token

SCHEMA = """
CREATE TABLE IF NOT EXISTS auth_browsers (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, name TEXT NOT NULL, expires REAL NOT NULL
);
"""

KEPT_S = 30 * 86_400.0
MOST = 100
"""Browsers of one login; the oldest one ends when another begins."""


@dataclass(frozen=True, slots=True)
class _Login:
    role: str
    name: str
    expires: float


class BrowserLogins:
    """All logins of browsers, by the SHA-256 of their secret."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT hash, role, name, expires FROM auth_browsers ORDER BY expires"
            ).fetchall()
        )
        self._logins = {hash_: _Login(*fields) for hash_, *fields in rows}

    async def begin(self, role: str, name: str) -> str:
        """Return the secret of a new login, which lasts `KEPT_S` seconds."""
        now, secret = self._clock.wall(), new_token()
        made = _Login(role, name, now + KEPT_S)
        theirs = self._of(role, name)
        over = [h for h, login in self._logins.items() if login.expires <= now]
        self._logins[_digest(secret)] = made
        await self._delete([*over, *theirs[: max(0, len(theirs) + 1 - MOST)]])
        hash_ = _digest(secret)

        def write(connection: sqlite3.Connection) -> None:
            if hash_ in self._logins:  # else it was revoked while the deletion was written
                connection.execute(
                    "INSERT INTO auth_browsers VALUES (?, ?, ?, ?)",
                    (hash_, role, name, made.expires),
                )

        await self._database.write(write)
        return secret

    def find(self, secret: str) -> tuple[str, str] | None:
        """Return role and name of a login that has not ended."""
        login = self._logins.get(_digest(secret))
        if login is None or login.expires <= self._clock.wall():
            return None
        return login.role, login.name

    async def end(self, secret: str) -> None:
        """End one login."""
        await self._delete([_digest(secret)])

    async def end_all(self, role: str, name: str) -> None:
        """End all logins that were made with a token of this owner."""
        await self._delete(self._of(role, name))

    def _of(self, role: str, name: str) -> list[str]:
        found = self._logins.items()
        return [hash_ for hash_, login in found if (login.role, login.name) == (role, name)]

    async def _delete(self, hashes: list[str]) -> None:
        ended = [hash_ for hash_ in hashes if self._logins.pop(hash_, None) is not None]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany(
                "DELETE FROM auth_browsers WHERE hash = ?", [(hash_,) for hash_ in ended]
            )

        if ended:
            await self._database.write(write)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
