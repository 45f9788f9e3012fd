"""Tickets: secrets that let machines and people in, for so many uses and so long.

Of a ticket only the SHA-256 is kept; its id is the beginning of that. Using one is a single write
to the database, so that the last use of a ticket is given once, however many ask at a time.
"""

from __future__ import annotations

import hmac
import sqlite3
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from atoll.errors import AuthError, ConfigError

TicketRole = Literal["node", "viewer", "operator"]

SCHEMA = """
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

ID_DIGITS = 10

MAX_USES_SHOWN = 100
"""Names in the list of who used a ticket; a ticket may let in thousands."""

_KEPT_S = 30 * 86_400.0
"""How long tickets that open nothing any more are still listed."""

_COLUMNS = (
    "t.hash, t.uses_left, t.expires, coalesce(f.role, 'node'), coalesce(f.note, ''),"
    " coalesce(f.made, 0), coalesce(f.made_by, ''), f.revoked"
)
_FROM = "auth_tickets t LEFT JOIN auth_ticket_facts f USING (hash)"


def insert_ticket(
    connection: sqlite3.Connection,
    digest: str,
    *,
    role: TicketRole = "node",
    uses: int | None = None,
    expires: float | None = None,
    note: str = "",
    made: float,
    made_by: str,
) -> None:
    """Keep a new ticket; one that is known stays as it is."""
    connection.execute(
        "INSERT OR IGNORE INTO auth_tickets VALUES (?, ?, ?)", (digest, uses, expires)
    )
    connection.execute(
        "INSERT OR IGNORE INTO auth_ticket_facts VALUES (?, ?, ?, ?, ?, NULL)",
        (digest, role, note, made, made_by),
    )
    _forget_old(connection, made)


def use_ticket(
    connection: sqlite3.Connection, digest: str, *, roles: tuple[str, ...], now: float
) -> str:
    """Use a ticket once and return its role.

    Raises:
        AuthError: it is unknown, revoked, expired, used up or for something else; says which.
    """
    row = connection.execute(
        f"SELECT {_COLUMNS} FROM {_FROM} WHERE t.hash = ?", (digest,)
    ).fetchone()
    remedy = "ask for a fresh one: `atoll ticket new` on the hub's machine prints it"
    if row is None or not hmac.compare_digest(row[0], digest):
        raise AuthError("this ticket is unknown to the hub", remedy=remedy)
    _, uses_left, expires, role, _, _, _, revoked = row
    if revoked is not None:
        raise AuthError("this ticket was revoked", remedy=remedy)
    if expires is not None and expires <= now:
        raise AuthError("this ticket has expired", remedy=remedy)
    if uses_left is not None and uses_left <= 0:
        raise AuthError("this ticket is used up", remedy=remedy)
    if role not in roles:
        raise _for_something_else(role)
    connection.execute(
        "UPDATE auth_tickets SET uses_left = uses_left - 1 WHERE hash = ?", (digest,)
    )
    return str(role)


def note_use(
    connection: sqlite3.Connection, digest: str, *, role: str, name: str, now: float, source: str
) -> None:
    """Write down who came in with a ticket."""
    connection.execute(
        "INSERT INTO auth_ticket_uses VALUES (?, ?, ?, ?, ?)", (digest, role, name, now, source)
    )


def list_tickets(connection: sqlite3.Connection, now: float) -> list[dict[str, Any]]:
    """Return every ticket, newest first, without its secret."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM {_FROM} ORDER BY 6 DESC").fetchall()
    tickets = []
    for digest, uses_left, expires, role, note, made, made_by, revoked in rows:
        used = connection.execute(
            "SELECT name FROM auth_ticket_uses WHERE hash = ? ORDER BY time DESC LIMIT ?",
            (digest, MAX_USES_SHOWN),
        ).fetchall()
        state = "open"
        if revoked is not None:
            state = "revoked"
        elif expires is not None and expires <= now:
            state = "expired"
        elif uses_left is not None and uses_left <= 0:
            state = "used up"
        tickets.append({
            "id": digest[:ID_DIGITS], "role": role, "name": note, "state": state,
            "uses_left": uses_left, "expires": expires, "made": made, "made_by": made_by,
            "used_by": [name for (name,) in used],
        })  # fmt: skip
    return tickets


def revoke_ticket(connection: sqlite3.Connection, id: str, now: float) -> list[str]:
    """End a ticket; return the names of the people who logged in with it.

    Raises:
        ConfigError: there is no such ticket.
    """
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
    """Return the ids of the tickets that a node came with and that still open."""
    used = connection.execute(
        "SELECT DISTINCT substr(hash, 1, ?) FROM auth_ticket_uses WHERE role = 'node' AND name = ?",
        (ID_DIGITS, node),
    ).fetchall()
    still = {t["id"] for t in list_tickets(connection, now) if t["state"] == "open"}
    return sorted(id for (id,) in used if id in still)


def _forget_old(connection: sqlite3.Connection, now: float) -> None:
    """Delete what is over for long, so that the tables do not grow for ever."""
    connection.execute(
        "DELETE FROM auth_tickets WHERE expires < ? OR hash IN"
        " (SELECT hash FROM auth_ticket_facts WHERE made < ? AND revoked IS NULL)"
        " AND uses_left <= 0",
        (now - _KEPT_S, now - _KEPT_S),
    )
    for table in ("auth_ticket_facts", "auth_ticket_uses"):
        connection.execute(f"DELETE FROM {table} WHERE hash NOT IN (SELECT hash FROM auth_tickets)")


def _for_something_else(role: str) -> AuthError:
    if role == "node":
        return AuthError(
            "this ticket is for a machine that offers itself, not for commands",
            remedy="`atoll ticket new --role operator` (or viewer) on the hub's machine prints one "
            "for `atoll login`",
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
    """Return the text of a ticket.

    Args:
        url: Where the hub is, http(s)://HOST:PORT.
        secret: What it opens with.
        advertise: HOST, HOST:PORT or a whole URL that stands in for `url`, e.g. of a proxy.
        mark: What the hub's TLS is to be checked with: a fingerprint, or `tls`; empty: no TLS.

    Raises:
        ConfigError: the address to advertise is none.
    """
    parts = urlsplit(url)
    host, port, prefix = parts.hostname or "", parts.port, ""
    if advertise:
        told = _read_address(advertise)
        host, port = told.hostname or "", told.port or port
        if told.scheme:
            port = told.port or (443 if told.scheme == "https" else 80)
            prefix = told.path.strip("/")
            mark = "tls" if told.scheme == "https" else ""  # a proxy before the hub speaks it
    host = f"[{host}]" if ":" in host else host
    end = f"~{mark}" if mark else ""
    return f"atoll://{host}:{port}/{prefix + '/' if prefix else ''}{secret}{end}"


def host_of(advertise: str) -> str:
    """Return the host of an address to advertise; empty for none; raises as `ticket_text` does."""
    return _read_address(advertise).hostname or "" if advertise else ""


def _read_address(advertise: str) -> SplitResult:
    """Return the parts of HOST, HOST:PORT or a URL."""
    told = urlsplit(advertise if "://" in advertise else f"//{_bracketed(advertise)}")
    try:
        right = bool(told.hostname) and told.port != 0
    except ValueError:
        right = False
    if not right or told.query or told.scheme not in ("", "http", "https"):
        raise ConfigError(
            "this address cannot be advertised",
            given=advertise,
            expected="HOST, HOST:PORT, or a URL like https://HOST/PREFIX",
        )
    return told


def _bracketed(address: str) -> str:
    """Return HOST[:PORT] whose IPv6 address, if it is one alone, is in brackets."""
    return f"[{address}]" if address.count(":") > 1 and "[" not in address else address
