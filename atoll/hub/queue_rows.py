"""What is looked up in the tables of queues."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

import msgspec

from atoll.hub.database import span
from atoll.hub.queue_backend import MAX_CLAIM_BYTES, Loaded, amounts_of, lease_seq
from atoll.wire.messages import QueueItem, QueueOptions, TopicItem

AMONG = "seq IN (SELECT value FROM json_each(?))"
"""Condition on many numbers with one parameter: their JSON list."""

# The plus keeps SQLite from looking through all of the queue for a few numbers.
OF_LEASES = f"SELECT lease, seq, state, nbytes, blob FROM queue_items WHERE +queue = ? AND {AMONG}"


def load(connection: sqlite3.Connection) -> tuple[Loaded, int]:
    """Return what is stored, from the indices alone, and how many items are done."""
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
    """Return the ready items that one answer holds, and their sizes."""
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
    """Return number, state, size and blob of the items whose last lease is one of these."""
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
    """Return when the oldest ready item of each queue was put, where there is one."""
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
    """Return the ready items after a number that one answer holds."""
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


def first_items(
    connection: sqlite3.Connection, prefix: str, limit: int
) -> list[tuple[int, str, str]]:
    """Return number, blob and state of items of the queues whose name begins so."""
    return connection.execute(
        "SELECT seq, blob, state FROM queue_items WHERE queue >= ? AND queue < ? LIMIT ?",
        (*span(prefix), limit),
    ).fetchall()


def forget(connection: sqlite3.Connection, prefix: str) -> None:
    """Drop the options and positions of the queues and topics whose name begins so."""
    for table, name in (("queue_options", "queue"), ("queue_positions", "topic")):
        connection.execute(f"DELETE FROM {table} WHERE {name} >= ? AND {name} < ?", span(prefix))
