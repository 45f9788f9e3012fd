"""Stores many items of many puts with few statements.

A statement per item would be simpler, but between two of them the interpreter changes threads: on
a busy hub that costs more than SQLite does.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from atoll.hub.queue_backend import Holds, Move, Stored, size_of
from atoll.wire.messages import QueueEntry

_SIZES = (128, 64, 32, 16, 8, 4, 2, 1)
"""Rows per statement: few different statements, so that SQLite need not read them again."""

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
    blobs: Holds | None,
    moves: list[Move],
) -> list[Stored]:
    """Store the items of puts (queue and entries) in order, each key once.

    Args:
        connection: The one of the write.
        puts: What to store.
        first: Number of the first item; the others follow.
        now: Wall time.
        blobs: Where the items' blobs are held.
        moves: Gets what became ready.

    Returns:
        What became of each put.

    Raises:
        HubError: a blob is not there any more.
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
    """Write rows; return, for each whose key was there already, its number and the older one."""
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
    """Return what became ready, queue by queue."""
    new = [row for row in rows if row[0] not in known]
    moves: dict[str, list[int]] = {}
    for row in new:
        moves.setdefault(row[1], []).append(row[5])
    return [Move(queue, "new", "ready", len(sizes), sum(sizes)) for queue, sizes in moves.items()]
