"""The tables of queues in the hub's database, and how those of earlier versions become these."""

from __future__ import annotations

import sqlite3

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

_ADDED = {
    "blob": "TEXT NOT NULL DEFAULT ''",
    "nbytes": "INTEGER NOT NULL DEFAULT 0",
    "put": "REAL NOT NULL DEFAULT 0",
}

_INDICES = (
    # Counts and sizes of a million items come from the first one, without reading an item.
    "queue_waiting ON queue_items (queue, seq, nbytes) WHERE state = 'ready'",
    "queue_leased ON queue_items (until) WHERE state = 'leased'",
    "queue_asked ON queue_items (queue, request) WHERE state = 'leased'",
    "queue_done ON queue_items (until) WHERE state = 'done'",
    "queue_dead ON queue_items (queue, seq) WHERE state = 'dead'",
)


def prepare(connection: sqlite3.Connection) -> int:
    """Bring the tables into their present form; return the number of the next item."""
    present = {row[1] for row in connection.execute("PRAGMA table_info(queue_items)")}
    for name, kind in _ADDED.items():
        if name not in present:
            connection.execute(f"ALTER TABLE queue_items ADD COLUMN {name} {kind}")
    if "nbytes" not in present:
        connection.execute("UPDATE queue_items SET nbytes = length(payload)")
        for name in ("queue_ready", "queue_open"):
            connection.execute(f"DROP INDEX IF EXISTS {name}")
    for index in _INDICES:
        connection.execute(f"CREATE INDEX IF NOT EXISTS {index}")
    row = connection.execute(
        "SELECT seq FROM sqlite_sequence WHERE name = 'queue_items'"
    ).fetchone()
    return (int(row[0]) if row else 0) + 1
