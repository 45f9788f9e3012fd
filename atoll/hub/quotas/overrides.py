"""Limits that a ticket sets for the nodes and logins that are created with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

import msgspec

from atoll.hub.db.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS quotas_of_tickets (hash TEXT PRIMARY KEY, limits TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS quotas_of_tokens (
    role TEXT NOT NULL, name TEXT NOT NULL, limits TEXT NOT NULL, PRIMARY KEY (role, name)
) WITHOUT ROWID;
"""


def set_for_ticket(connection: sqlite3.Connection, ticket: str, limits: Mapping[str, int]) -> None:
    """Store the limits of a ticket, by its hash."""
    if limits:
        text = msgspec.json.encode(limits).decode()
        connection.execute("INSERT OR REPLACE INTO quotas_of_tickets VALUES (?, ?)", (ticket, text))


def pass_on(connection: sqlite3.Connection, ticket: str, *, role: str, name: str) -> None:
    """Give the limits of a ticket to the login or node that has used it."""
    connection.execute("DELETE FROM quotas_of_tokens WHERE role = ? AND name = ?", (role, name))
    connection.execute(
        "INSERT INTO quotas_of_tokens SELECT ?, ?, limits FROM quotas_of_tickets WHERE hash = ?",
        (role, name, ticket),
    )


def of_ticket(connection: sqlite3.Connection, ticket: str) -> dict[str, int]:
    """Return the limits of a ticket."""
    row = connection.execute(
        "SELECT limits FROM quotas_of_tickets WHERE hash = ?", (ticket,)
    ).fetchone()
    return msgspec.json.decode(row[0], type=dict[str, int]) if row else {}


def forget_tickets(connection: sqlite3.Connection) -> None:
    """Delete the limits of tickets that no longer exist."""
    connection.execute(
        "DELETE FROM quotas_of_tickets WHERE hash NOT IN (SELECT hash FROM auth_tickets)"
    )


class Overrides:
    """The limits of tokens, read once each."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[tuple[str, str], Mapping[str, int]] = {}

    def __call__(self, role: str, name: str) -> Mapping[str, int]:
        """Return the limits of a login or node, by name of the quota."""
        key = (role, name)
        if key not in self._known:
            row = self._database.read_now(
                lambda connection: connection.execute(
                    "SELECT limits FROM quotas_of_tokens WHERE role = ? AND name = ?", key
                ).fetchone()
            )
            self._known[key] = msgspec.json.decode(row[0], type=dict[str, int]) if row else {}
        return self._known[key]

    def forget(self, role: str, name: str) -> None:
        """Read the limits of a token anew: it was just made."""
        self._known.pop((role, name), None)
