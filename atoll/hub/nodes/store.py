"""Node records, and which of them survive a restart of the hub."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field

from atoll.errors import AtollError
from atoll.hub.db.database import Database
from atoll.wire.messages import NodeInfo

SCHEMA = """
CREATE TABLE IF NOT EXISTS node_records (
    node TEXT PRIMARY KEY, incarnation TEXT NOT NULL, draining INTEGER NOT NULL,
    reason TEXT NOT NULL
) WITHOUT ROWID;
"""


@dataclass
class Node:
    """A machine that joined."""

    node: str
    info: NodeInfo
    incarnation: str
    connected: bool = True
    draining: bool = False
    """It is draining and gets no new work."""
    drain_reason: str = ""
    left: bool = False
    """Its agent said that it ends."""
    last_seen: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The last known state of a node."""

    incarnation: str
    draining: bool = False
    reason: str = ""
    """Why it drains."""


class NodeStore:
    """The records of all nodes: read once, kept in memory, written when one changes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        rows = database.read_now(
            lambda connection: connection.execute(
                "SELECT node, incarnation, draining, reason FROM node_records"
            ).fetchall()
        )
        self._records = {row[0]: NodeRecord(row[1], bool(row[2]), row[3]) for row in rows}

    def get(self, node: str) -> NodeRecord | None:
        """Return the last known state of a node, also from an earlier hub process."""
        return self._records.get(node)

    async def put(self, node: str, record: NodeRecord) -> None:
        """Store a node's record; returns when it is durable. On an error the old one holds."""
        before = self._records.get(node)
        if before == record:
            return
        self._records[node] = record
        row = (node, record.incarnation, int(record.draining), record.reason)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO node_records VALUES (?, ?, ?, ?)", row)

        try:
            await self._database.write(write)
        except AtollError:
            if self._records.get(node) is record:
                self._restore(node, before)
            raise

    def _restore(self, node: str, before: NodeRecord | None) -> None:
        if before is None:
            del self._records[node]
        else:
            self._records[node] = before
