"""SQL of `SqliteBackend`: queries, bulk insert and tables.

Puts are merged into few statements, because between two statements the interpreter switches
threads, which costs more than SQLite's work.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.hub.db.database import span
from atoll.hub.queues.backend import (
    MAX_CLAIM_BYTES,
    DeadLetter,
    HeldBlobs,
    ItemState,
    Loaded,
    Move,
    Stored,
    amounts_of,
    lease_seq,
    size_of,
)
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

AMONG = "seq IN (SELECT value FROM json_each(?))"
"""Condition on many numbers as one parameter, a JSON list."""

# The unary plus disables the index on `queue`, which would scan the whole queue.
OF_LEASES = f"SELECT lease, seq, state, nbytes, blob FROM queue_items WHERE +queue = ? AND {AMONG}"


def load(connection: sqlite3.Connection) -> tuple[Loaded, int]:
    """Return what is stored, from the indices alone, and the number of done items."""
    rows = [
        row
        for state in ("ready", "leased", "dead")
        for row in connection.execute(
            f"SELECT queue, '{state}', count(*), sum(nbytes) FROM queue_items"
            f" WHERE state = '{state}' GROUP BY queue"
        )
    ]
    loaded = Loaded(amounts=amounts_of(rows))
    for queue, topic, text in connection.execute("SELECT queue, topic, options FROM queue_options"):
        loaded.options[queue] = msgspec.json.decode(text, type=QueueOptions)
        if topic:
            loaded.topics.add(queue)
    (done,) = connection.execute("SELECT count(*) FROM queue_items WHERE state = 'done'").fetchone()
    return loaded, done


def take(
    connection: sqlite3.Connection, queue: str, limit: int
) -> tuple[list[QueueItem], list[int]]:
    """Return the ready items that fit in one answer, and their sizes."""
    items: list[QueueItem] = []
    sizes: list[int] = []
    nbytes = 0
    cursor = connection.execute(
        "SELECT seq, key, payload, attempt, blob, nbytes FROM queue_items"
        " WHERE queue = ? AND state = 'ready' ORDER BY seq LIMIT ?",
        (queue, limit),
    )
    for seq, key, payload, attempt, blob, size in cursor:
        nbytes += len(payload)
        if items and nbytes > MAX_CLAIM_BYTES:
            break
        items.append(QueueItem(seq, key, payload, attempt, "", blob))
        sizes.append(size)
    cursor.close()
    return items, sizes


def of_leases(
    connection: sqlite3.Connection, queue: str, leases: Sequence[str]
) -> dict[str, tuple[int, str, int, str]]:
    """Return number, state, size and blob of the items with these latest leases, by lease."""
    wanted = set(leases)
    rows = connection.execute(
        OF_LEASES,
        (queue, json.dumps([lease_seq(lease) for lease in wanted])),
    )
    return {row[0]: row[1:] for row in rows if row[0] in wanted}


def dead(
    connection: sqlite3.Connection, queue: str, seqs: Sequence[int] | None
) -> list[tuple[int, int, str]]:
    """Return number, size and blob of dead letters."""
    rows = connection.execute(
        "SELECT seq, nbytes, blob FROM queue_items WHERE queue = ? AND state = 'dead'", (queue,)
    ).fetchall()
    wanted = None if seqs is None else set(seqs)
    return [row for row in rows if wanted is None or row[0] in wanted]


def oldest(connection: sqlite3.Connection, queues: Sequence[str]) -> dict[str, float]:
    """Return the put time of the oldest ready item of each queue that has one."""
    found = {}
    for queue in queues:
        row = connection.execute(
            "SELECT put FROM queue_items WHERE queue = ? AND state = 'ready' ORDER BY seq LIMIT 1",
            (queue,),
        ).fetchone()
        if row is not None:
            found[queue] = float(row[0])
    return found


def peek(connection: sqlite3.Connection, topic: str, after: int, limit: int) -> list[TopicItem]:
    """Return the ready items after a number that fit in one answer."""
    items: list[TopicItem] = []
    nbytes = 0
    cursor = connection.execute(
        "SELECT seq, key, payload, put, blob FROM queue_items"
        " WHERE queue = ? AND state = 'ready' AND seq > ? ORDER BY seq LIMIT ?",
        (topic, after, limit),
    )
    for row in cursor:
        nbytes += len(row[2])
        if items and nbytes > MAX_CLAIM_BYTES:
            break
        items.append(TopicItem(*row))
    cursor.close()
    return items


def last(connection: sqlite3.Connection, topic: str) -> int:
    """Return the number of the newest ready item of a topic; 0: there is none."""
    (seq,) = connection.execute(
        "SELECT max(seq) FROM queue_items WHERE queue = ? AND state = 'ready'", (topic,)
    ).fetchone()
    return int(seq or 0)


def positions(connection: sqlite3.Connection, topic: str) -> dict[str, int]:
    """Return the position of each subscription of a topic."""
    rows = connection.execute(
        "SELECT subscription, seq FROM queue_positions WHERE topic = ?", (topic,)
    )
    return dict(rows.fetchall())


def known(connection: sqlite3.Connection, queue: str, keys: Sequence[str]) -> dict[str, int]:
    """Return the numbers of items that have these keys."""
    rows = connection.execute(
        "SELECT key, seq FROM queue_items"
        " WHERE queue = ? AND key IN (SELECT value FROM json_each(?))",
        (queue, json.dumps(list(keys))),
    )
    return dict(rows.fetchall())


def dead_letters(connection: sqlite3.Connection, queue: str, limit: int) -> list[DeadLetter]:
    """Return the oldest dead letters of a queue."""
    rows = connection.execute(
        "SELECT seq, key, payload, attempt, reason, blob FROM queue_items"
        " WHERE queue = ? AND state = 'dead' ORDER BY seq LIMIT ?",
        (queue, limit),
    )
    return [DeadLetter(*row) for row in rows.fetchall()]


def first_items(
    connection: sqlite3.Connection, prefix: str, limit: int
) -> list[tuple[int, str, str]]:
    """Return number, blob and state of items of all queues with this prefix."""
    return connection.execute(
        "SELECT seq, blob, state FROM queue_items WHERE queue >= ? AND queue < ? LIMIT ?",
        (*span(prefix), limit),
    ).fetchall()


def forget(connection: sqlite3.Connection, prefix: str) -> None:
    """Delete the options and positions of all queues and topics with this prefix."""
    for table, name in (("queue_options", "queue"), ("queue_positions", "topic")):
        connection.execute(f"DELETE FROM {table} WHERE {name} >= ? AND {name} < ?", span(prefix))


_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
"""Rows per statement: few distinct statements, so that SQLite can cache them."""

_INTO = "INSERT INTO queue_items (seq, queue, key, payload, blob, nbytes, put) VALUES "
_STATEMENTS = {
    size: _INTO + ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * size) + " ON CONFLICT DO NOTHING"
    for size in _SIZES
}


def insert(
    connection: sqlite3.Connection,
    puts: Sequence[tuple[str, Sequence[QueueEntry]]],
    *,
    first: int,
    now: float,
    blobs: HeldBlobs | None,
    moves: list[Move],
) -> list[Stored]:
    """Store the items of puts (queue, entries) in order, each key once.

    The first item gets number `first`. `moves` is extended by the moves to ready. Raises HubError
    if a blob does not exist.
    """
    rows: list[tuple[Any, ...]] = []
    for queue, entries in puts:
        for entry in entries:
            seq = first + len(rows)
            nbytes = size_of(entry)
            rows.append((seq, queue, entry.key, entry.payload, entry.blob, nbytes, now))
    known = _store(connection, rows)
    for row in rows:
        if row[4] and row[0] not in known and blobs is not None:
            blobs.hold(connection, row[4], f"queue/{row[0]}")
    moves += _moves(rows, known)
    stored: list[Stored] = []
    for _, entries in puts:
        numbers = range(first, first + len(entries))
        first += len(entries)
        if known:
            duplicates = [place for place, seq in enumerate(numbers) if seq in known]
            stored.append(Stored([known.get(seq, seq) for seq in numbers], duplicates))
        else:
            stored.append(Stored(list(numbers), []))
    return stored


def _store(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """Write rows; return new number -> existing number for keys that were known."""
    known: dict[int, int] = {}
    start = 0
    for size in _SIZES:
        while len(rows) - start >= size:
            some = rows[start : start + size]
            start += size
            values = [value for row in some for value in row]
            written = connection.execute(_STATEMENTS[size], values).rowcount
            if written < size:
                known |= _older(connection, some)
    return known


def _older(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    found: dict[int, int] = {}
    for row in rows:
        (seq,) = connection.execute(
            "SELECT seq FROM queue_items WHERE queue = ? AND key = ?", row[1:3]
        ).fetchone()
        if seq != row[0]:
            found[row[0]] = seq
    return found


def _moves(rows: Sequence[tuple[Any, ...]], known: dict[int, int]) -> list[Move]:
    new = [row for row in rows if row[0] not in known]
    moves: dict[str, list[int]] = {}
    for row in new:
        moves.setdefault(row[1], []).append(row[5])
    return [
        Move(queue, ItemState.NEW, ItemState.READY, len(sizes), sum(sizes))
        for queue, sizes in moves.items()
    ]


SCHEMA = """
CREATE TABLE IF NOT EXISTS queue_items (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    queue TEXT NOT NULL,
    key TEXT NOT NULL,
    payload BLOB NOT NULL,
    state TEXT NOT NULL DEFAULT 'ready',
    attempt INTEGER NOT NULL DEFAULT 0,
    lease TEXT NOT NULL DEFAULT '',
    request TEXT NOT NULL DEFAULT '',
    until REAL NOT NULL DEFAULT 0,
    reason TEXT NOT NULL DEFAULT '',
    blob TEXT NOT NULL DEFAULT '',
    nbytes INTEGER NOT NULL DEFAULT 0,
    put REAL NOT NULL DEFAULT 0,
    UNIQUE (queue, key)
);
CREATE TABLE IF NOT EXISTS queue_options (
    queue TEXT PRIMARY KEY, topic INTEGER NOT NULL, options TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS queue_positions (
    topic TEXT NOT NULL, subscription TEXT NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (topic, subscription)
) WITHOUT ROWID;
"""

OPTIONS = "INSERT OR REPLACE INTO queue_options (queue, topic, options) VALUES (?, ?, ?)"

POSITION = "INSERT OR REPLACE INTO queue_positions (topic, subscription, seq) VALUES (?, ?, ?)"

_INDICES = (
    # Counts and sizes of a million items come from the first index alone.
    "queue_waiting ON queue_items (queue, seq, nbytes) WHERE state = 'ready'",
    "queue_leased ON queue_items (until) WHERE state = 'leased'",
    "queue_asked ON queue_items (queue, request) WHERE state = 'leased'",
    "queue_done ON queue_items (until) WHERE state = 'done'",
    "queue_dead ON queue_items (queue, seq) WHERE state = 'dead'",
)


def prepare(connection: sqlite3.Connection) -> int:
    """Create the indices; return the number of the next item."""
    for index in _INDICES:
        connection.execute(f"CREATE INDEX IF NOT EXISTS {index}")
    row = connection.execute(
        "SELECT seq FROM sqlite_sequence WHERE name = 'queue_items'"
    ).fetchone()
    return (int(row[0]) if row else 0) + 1
