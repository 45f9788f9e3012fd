"""Secrets of users, e.g. keys of services: encrypted in the database, given to processes of jobs.

AES-256-GCM. The key is in a separate file beside the database, which no backup contains; the name
of the secret is the associated data. A copy of the database therefore reveals names only, and rows
cannot be swapped. It does not protect from a person who can read the hub's data folder.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.clock import Clock
from atoll.config.redaction import SHORTEST
from atoll.errors import ConfigError, HubError, unknown
from atoll.hub.db.database import Database

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SCHEMA = """
CREATE TABLE IF NOT EXISTS secrets (
    name TEXT PRIMARY KEY, sealed BLOB NOT NULL, changed REAL NOT NULL, changed_by TEXT NOT NULL
);
"""

KEY_FILE = "secrets.key"
_KEY_BYTES, _NONCE_BYTES = 32, 12

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
LONGEST = 65_536
"""Characters of a value."""


class Secrets:
    """All secrets of a hub."""

    def __init__(self, database: Database, *, folder: Path, clock: Clock) -> None:
        """Use the key in `folder`; it is made with the first secret."""
        self._database = database
        self._file = folder / KEY_FILE
        self._clock = clock

    async def set(self, name: str, value: str, *, by: str) -> None:
        """Store a secret; one of the same name is replaced. Raises ConfigError, HubError."""
        if not NAME.fullmatch(name) or name.upper().startswith("ATOLL_"):
            raise ConfigError(
                "this cannot be the name of a secret",
                given=repr(name[:100]),
                expected="letters, digits and underscores, not ATOLL_ in front",
            )
        if not SHORTEST <= len(value) <= LONGEST or "\0" in value:
            raise ConfigError(
                "a secret is too short or too long",
                given=f"{name} with {len(value)} characters",
                expected=f"{SHORTEST} to {LONGEST}, and no zero byte",
            )
        nonce = os.urandom(_NONCE_BYTES)
        sealed = nonce + self._cipher(new=True).encrypt(nonce, value.encode(), name.encode())
        row = (name, sealed, self._clock.wall(), by)
        await self._database.write(
            lambda connection: connection.execute(
                "INSERT OR REPLACE INTO secrets VALUES (?, ?, ?, ?)", row
            )
        )

    async def listing(self) -> list[dict[str, Any]]:
        """Return name, time of the last change (seconds since 1970) and who made it, by name."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                "SELECT name, changed, changed_by FROM secrets ORDER BY name"
            ).fetchall()
        )
        return [dict(zip(("name", "changed", "changed_by"), row, strict=True)) for row in rows]

    async def remove(self, name: str) -> None:
        """Delete a secret; ConfigError if there is none of that name."""
        await self.check([name])

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM secrets WHERE name = ?", (name,))

        await self._database.write(write)

    async def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError if one of the names is unknown."""
        known = [secret["name"] for secret in await self.listing()]
        for name in names:
            if name not in known:
                raise _missing(name, known)

    async def values(self, names: Iterable[str]) -> dict[str, str]:
        """Return the values of secrets.

        Raises:
            ConfigError: one of them is unknown.
            HubError: one cannot be decrypted, because the hub has lost its key.
        """
        wanted = list(names)
        rows = await self._database.read(
            lambda connection: dict(connection.execute("SELECT name, sealed FROM secrets"))
        )
        for name in wanted:
            if name not in rows:
                raise _missing(name, list(rows))
        return {name: self._open(name, rows[name]) for name in wanted}

    def _open(self, name: str, sealed: bytes) -> str:
        from cryptography.exceptions import InvalidTag

        nonce, rest = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        try:
            return self._cipher().decrypt(nonce, rest, name.encode()).decode()
        except InvalidTag:
            raise HubError(
                f"the secret {name} cannot be read",
                given=f"another key in {self._file}",
                remedy=f"restore the {KEY_FILE} with which it was set, or set it again: "
                f"atoll secret set {name}",
            ) from None

    def _cipher(self, *, new: bool = False) -> AESGCM:
        """Return the cipher; its library is loaded with the first secret."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if new and not self._file.exists():
            scratch = self._file.with_suffix(".new")
            descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            scratch.replace(self._file)
        try:
            key = self._file.read_bytes()
        except OSError as error:
            raise _no_key(self._file, str(error)) from error
        if len(key) != _KEY_BYTES:
            raise _no_key(self._file, f"{len(key)} bytes")
        return AESGCM(key)


def _missing(name: str, known: list[str]) -> ConfigError:
    error = unknown("secret", name, known)
    return ConfigError(
        error.what,
        given=str(error.given),
        expected=str(error.expected) if known else "a secret that the hub has",
        remedy=f"atoll secret set {name}" if NAME.fullmatch(name) else error.remedy,
    )


def _no_key(file: Path, why: str) -> HubError:
    return HubError(
        "the hub has no key for its secrets",
        given=why,
        expected=f"the file {file}",
        remedy="put it back, or set every secret again: `atoll secret list` names them",
    )
