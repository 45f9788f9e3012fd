"""Tickets: secrets that admit machines and people, limited in uses and time.

Only the SHA-256 is kept; its first digits are the id. A use is a single database write, so
concurrent requests cannot share the last one.
"""

from __future__ import annotations

import hmac
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from atoll.errors import AuthError, ConfigError
from atoll.hub.quotas import overrides
from atoll.hub.security import scopes

TicketRole = Literal["node", "viewer", "operator", "program"]


class TicketState(StrEnum):
    """Whether a ticket admits."""

    OPEN = "open"
    REVOKED = "revoked"
    EXPIRED = "expired"
    USED_UP = "used up"


SCHEMA = (
    overrides.SCHEMA
    + """
CREATE TABLE IF NOT EXISTS auth_tickets (
    hash TEXT PRIMARY KEY, uses_left INTEGER, expires REAL
);
CREATE TABLE IF NOT EXISTS auth_ticket_facts (
    hash TEXT PRIMARY KEY, role TEXT NOT NULL, note TEXT NOT NULL, made REAL NOT NULL,
    made_by TEXT NOT NULL, revoked REAL
);
CREATE TABLE IF NOT EXISTS auth_ticket_uses (
    hash TEXT NOT NULL, role TEXT NOT NULL, name TEXT NOT NULL, time REAL NOT NULL,
    source TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS auth_ticket_uses_of ON auth_ticket_uses (hash);
DROP TABLE IF EXISTS hub_tickets;
"""
)

ID_DIGITS = 10

MAX_USES_SHOWN = 100
"""Names listed per ticket; a ticket may admit thousands."""

_ASK = "ask for a fresh one: `atoll ticket new` on the hub's machine prints it"

_KEPT_S = 30 * 86_400.0
"""How long tickets that are no longer valid are still listed."""

_COLUMNS = (
    "t.hash, t.uses_left, t.expires, coalesce(f.role, 'node'), coalesce(f.note, ''),"
    " coalesce(f.made, 0), coalesce(f.made_by, ''), f.revoked"
)
_FROM = "auth_tickets t LEFT JOIN auth_ticket_facts f USING (hash)"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTicket:
    """What a new ticket permits, and its origin."""

    role: TicketRole = "node"
    uses: int | None = None
    """How many may use it; None: any number."""
    expires: float | None = None
    """Seconds since 1970; None: never."""
    note: str = ""
    """For people."""
    made: float
    """Seconds since 1970."""
    made_by: str
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Quota name -> limit of each node or login that uses it; other quotas are the hub's."""
    queues: Sequence[str] = ()
    """Names below which a program may use queues; empty: all that are shared."""


def insert_ticket(connection: sqlite3.Connection, digest: str, ticket: NewTicket) -> None:
    """Store a new ticket; a known one is left unchanged."""
    connection.execute(
        "INSERT OR IGNORE INTO auth_tickets VALUES (?, ?, ?)",
        (digest, ticket.uses, ticket.expires),
    )
    connection.execute(
        "INSERT OR IGNORE INTO auth_ticket_facts VALUES (?, ?, ?, ?, ?, NULL)",
        (digest, ticket.role, ticket.note, ticket.made, ticket.made_by),
    )
    overrides.set_for_ticket(connection, digest, ticket.quotas)
    scopes.set_for_ticket(connection, digest, ticket.queues)
    _forget_old(connection, ticket.made)


def check_known(connection: sqlite3.Connection, digest: str) -> None:
    """Raise AuthError if there is no such ticket, valid or not."""
    if not connection.execute("SELECT 1 FROM auth_tickets WHERE hash = ?", (digest,)).fetchone():
        raise _unknown()


def use_ticket(
    connection: sqlite3.Connection, digest: str, *, roles: tuple[str, ...], now: float
) -> str:
    """Use a ticket once and return its role; raises AuthError with the reason if it is invalid."""
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE t.hash = ?", (digest,)
    ).fetchone()
    if row is None or not hmac.compare_digest(row[0], digest):
        raise _unknown()
    _, uses_left, expires, role, _, _, _, revoked = row
    if revoked is not None:
        raise AuthError("this ticket was revoked", remedy=_ASK)
    if expires is not None and expires <= now:
        raise AuthError("this ticket has expired", remedy=_ASK)
    if uses_left is not None and uses_left <= 0:
        raise AuthError("this ticket is used up", remedy=_ASK)
    if role not in roles:
        raise _for_something_else(role)
    connection.execute(
        "UPDATE auth_tickets SET uses_left = uses_left - 1 WHERE hash = ?", (digest,)
    )
    return str(role)


def note_use(
    connection: sqlite3.Connection, digest: str, *, role: str, name: str, now: float, source: str
) -> None:
    """Record the node or login that used a ticket."""
    connection.execute(
        "INSERT INTO auth_ticket_uses VALUES (?, ?, ?, ?, ?)", (digest, role, name, now, source)
    )
    overrides.pass_on(connection, digest, role=role, name=name)


def list_tickets(connection: sqlite3.Connection, now: float) -> list[dict[str, Any]]:
    """Return every ticket, newest first, without its secret."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM {_FROM} ORDER BY 6 DESC").fetchall()
    tickets = []
    for digest, uses_left, expires, role, note, made, made_by, revoked in rows:
        used = connection.execute(
            "SELECT name FROM auth_ticket_uses WHERE hash = ? ORDER BY time DESC LIMIT ?",
            (digest, MAX_USES_SHOWN),
        ).fetchall()
        state = TicketState.OPEN
        if revoked is not None:
            state = TicketState.REVOKED
        elif expires is not None and expires <= now:
            state = TicketState.EXPIRED
        elif uses_left is not None and uses_left <= 0:
            state = TicketState.USED_UP
        tickets.append({
            "id": digest[:ID_DIGITS], "role": role, "name": note, "state": state,
            "uses_left": uses_left, "expires": expires, "made": made, "made_by": made_by,
            "used_by": [name for (name,) in used],
            "quotas": overrides.of_ticket(connection, digest),
            "queues": list(scopes.of_ticket(connection, digest)),
        })  # fmt: skip
    return tickets


def revoke_ticket(connection: sqlite3.Connection, id: str, now: float) -> list[str]:
    """Revoke a ticket; return the names of its logins. Raises ConfigError if it does not exist."""
    if len(id) != ID_DIGITS or not id.isalnum():
        raise _no_such(id)
    row = connection.execute(
        f"SELECT t.hash, coalesce(f.role, 'node') FROM {_FROM} WHERE substr(t.hash, 1, ?) = ?",
        (ID_DIGITS, id),
    ).fetchone()
    if row is None:
        raise _no_such(id)
    digest, role = row
    connection.execute(
        "INSERT INTO auth_ticket_facts VALUES (?, ?, '', ?, '', ?)"
        " ON CONFLICT (hash) DO UPDATE SET revoked = excluded.revoked",
        (digest, role, now, now),
    )
    used = connection.execute(
        "SELECT name FROM auth_ticket_uses WHERE hash = ? AND role != 'node'", (digest,)
    ).fetchall()
    return [name for (name,) in used]


def is_revoked(connection: sqlite3.Connection, digest: str) -> bool:
    """Return whether a ticket was revoked."""
    row = connection.execute(
        "SELECT 1 FROM auth_ticket_facts WHERE hash = ? AND revoked IS NOT NULL", (digest,)
    ).fetchone()
    return row is not None


def tickets_of(connection: sqlite3.Connection, node: str, now: float) -> list[str]:
    """Return the ids of the still valid tickets that a node has used."""
    used = connection.execute(
        "SELECT DISTINCT substr(hash, 1, ?) FROM auth_ticket_uses WHERE role = 'node' AND name = ?",
        (ID_DIGITS, node),
    ).fetchall()
    still = {t["id"] for t in list_tickets(connection, now) if t["state"] == TicketState.OPEN}
    return sorted(id for (id,) in used if id in still)


def _forget_old(connection: sqlite3.Connection, now: float) -> None:
    connection.execute(
        "DELETE FROM auth_tickets WHERE expires < ? OR hash IN"
        " (SELECT hash FROM auth_ticket_facts WHERE made < ? AND revoked IS NULL)"
        " AND uses_left <= 0",
        (now - _KEPT_S, now - _KEPT_S),
    )
    for table in ("auth_ticket_facts", "auth_ticket_uses"):
        connection.execute(f"DELETE FROM {table} WHERE hash NOT IN (SELECT hash FROM auth_tickets)")
    overrides.forget_tickets(connection)
    scopes.forget_tickets(connection)


def _unknown() -> AuthError:
    return AuthError("this ticket is unknown to the hub", remedy=_ASK)


def _for_something_else(role: str) -> AuthError:
    if role == "node":
        return AuthError(
            "this ticket is for a node, not for a login",
            remedy="`atoll ticket new --role operator` (or viewer) on the hub's machine prints one "
            "for `atoll login`",
        )
    if role == "program":
        return AuthError(
            "this ticket is for a program, not for a machine or a person",
            remedy="use it with `atoll.connect`; `atoll ticket new` prints one for `atoll join`",
        )
    return AuthError(
        f"this ticket is for a person ({role}), not for a machine",
        remedy="use it with `atoll login`; `atoll ticket new` prints one for `atoll join`",
    )


def _no_such(id: str) -> ConfigError:
    return ConfigError(
        "there is no such ticket", given=repr(id[:40]), remedy="`atoll ticket list` shows their ids"
    )


def ticket_text(url: str, secret: str, *, advertise: str = "", mark: str = "") -> str:
    """Return the ticket as the text that users pass to `atoll join`.

    Args:
        url: Address of the hub, http(s)://HOST:PORT.
        secret: Secret of the ticket.
        advertise: HOST, HOST:PORT or URL that replaces `url`; raises ConfigError if invalid.
        mark: How to verify the hub's TLS: a fingerprint, or `tls`; empty: no TLS.
    """
    parts = urlsplit(url)
    host, port, prefix = parts.hostname or "", parts.port, ""
    if advertise:
        parsed = _read_address(advertise)
        host, port = parsed.hostname or "", parsed.port or port
        if parsed.scheme:
            port = parsed.port or (443 if parsed.scheme == "https" else 80)
            prefix = parsed.path.strip("/")
            mark = "tls" if parsed.scheme == "https" else ""  # the proxy terminates TLS
    host = f"[{host}]" if ":" in host else host
    end = f"~{mark}" if mark else ""
    return f"atoll://{host}:{port}/{prefix + '/' if prefix else ''}{secret}{end}"


def host_of(advertise: str) -> str:
    """Return the host of an advertised address, or empty; raises like `ticket_text`."""
    return _read_address(advertise).hostname or "" if advertise else ""


def _read_address(advertise: str) -> SplitResult:
    parsed = urlsplit(advertise if "://" in advertise else f"//{_bracketed(advertise)}")
    try:
        right = bool(parsed.hostname) and parsed.port != 0
    except ValueError:
        right = False
    if not right or parsed.query or parsed.scheme not in ("", "http", "https"):
        raise ConfigError(
            "this address cannot be advertised",
            given=advertise,
            expected="HOST, HOST:PORT, or a URL like https://HOST/PREFIX",
        )
    return parsed


def _bracketed(address: str) -> str:
    return f"[{address}]" if address.count(":") > 1 and "[" not in address else address
