"""Queues and topics that a program's ticket permits: those below some names, or all shared ones."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import msgspec

from atoll.errors import ConfigError
from atoll.ids import check_name

SCHEMA = """
CREATE TABLE IF NOT EXISTS auth_ticket_queues (hash TEXT PRIMARY KEY, queues TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS auth_program_queues (name TEXT PRIMARY KEY, queues TEXT NOT NULL);
"""

MOST_SCOPES = 64
"""Names of one ticket."""


def checked_scopes(queues: Sequence[str], *, role: str) -> tuple[str, ...]:
    """Check and return the names below which a ticket permits queues, without duplicates.

    Raises:
        ConfigError: the ticket's role is not `program`, or programs cannot use such a name.
    """
    if queues and role != "program":
        raise ConfigError(
            "only a program's ticket is limited to queues", given=f"role {role}",
            expected="role program",
        )  # fmt: skip
    if len(queues) > MOST_SCOPES:
        raise ConfigError(
            "too many names for one ticket", given=len(queues), expected=f"at most {MOST_SCOPES}"
        )
    for scope in queues:
        first, *rest = scope.split("/")
        if first == "node":
            raise ConfigError(
                "these queues are the nodes'", given=repr(scope), expected="e.g. pool/ada"
            )
        for part in (first, *rest):
            check_name("name of queues", part)
    return tuple(dict.fromkeys(queues))


def is_below(queue: str, scopes: Sequence[str]) -> bool:
    """Return whether a queue has one of these names, or lies below one: `a/b` of `a`."""
    return queue in scopes or queue.startswith(tuple(f"{scope}/" for scope in scopes))


def set_for_ticket(connection: sqlite3.Connection, ticket: str, queues: Sequence[str]) -> None:
    """Store the names that a ticket permits; `ticket` is its hash."""
    if queues:
        text = msgspec.json.encode(queues).decode()
        connection.execute(
            "INSERT OR REPLACE INTO auth_ticket_queues VALUES (?, ?)", (ticket, text)
        )


def pass_on(connection: sqlite3.Connection, ticket: str, *, name: str) -> tuple[str, ...]:
    """Copy the names that a ticket permits to the login that used it; return them."""
    queues = of_ticket(connection, ticket)
    connection.execute("DELETE FROM auth_program_queues WHERE name = ?", (name,))
    if queues:
        connection.execute(
            "INSERT INTO auth_program_queues SELECT ?, queues FROM auth_ticket_queues"
            " WHERE hash = ?", (name, ticket),
        )  # fmt: skip
    return queues


def of_ticket(connection: sqlite3.Connection, ticket: str) -> tuple[str, ...]:
    """Return the names below which a ticket permits queues; empty: all that are shared."""
    row = connection.execute(
        "SELECT queues FROM auth_ticket_queues WHERE hash = ?", (ticket,)
    ).fetchone()
    return read_scopes(row[0] if row else None)


def read_scopes(text: str | None) -> tuple[str, ...]:
    """Return the names of a stored text; empty without one."""
    return msgspec.json.decode(text, type=tuple[str, ...]) if text else ()


def forget_tickets(connection: sqlite3.Connection) -> None:
    """Delete the names of tickets that no longer exist."""
    connection.execute(
        "DELETE FROM auth_ticket_queues WHERE hash NOT IN (SELECT hash FROM auth_tickets)"
    )
