"""What members have sent and received: the one count that every view, point and report shows.

A process counts from its start, so its figures begin anew with every restart. The hub adds the
processes of a member up, and those of a node: no total ever falls, and members, nodes and jobs
agree. Tensors are counted, on every route; control messages are not.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from atoll.hub.db.database import Database
from atoll.wire.messages import Point

SCHEMA = """
CREATE TABLE IF NOT EXISTS traffic (
    job TEXT NOT NULL, member TEXT NOT NULL, incarnation TEXT NOT NULL,
    sent REAL NOT NULL, received REAL NOT NULL, PRIMARY KEY (job, member, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS node_traffic (
    node TEXT PRIMARY KEY, sent REAL NOT NULL, received REAL NOT NULL
) WITHOUT ROWID;
"""

SENT, RECEIVED = "sent_bytes", "received_bytes"

MOST_BYTES = 1e15
"""Of one process; a larger or negative count is a lie or NaN, and would spoil its node's total."""


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes sent and received."""

    sent: float = 0.0
    received: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.sent + other.sent, self.received + other.received)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(max(0.0, self.sent - other.sent), max(0.0, self.received - other.received))


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """What one batch of points adds; stored with the batch, then counted."""

    job: str
    member: str
    incarnation: str
    node: str
    counters: Bytes
    """The newest counters of the process."""
    added: Bytes

    def store(self, connection: sqlite3.Connection) -> None:
        """Write it in the transaction of its points."""
        connection.execute(
            "INSERT OR REPLACE INTO traffic VALUES (?, ?, ?, ?, ?)",
            (self.job, self.member, self.incarnation, self.counters.sent, self.counters.received),
        )
        if self.node:
            connection.execute(
                "INSERT INTO node_traffic VALUES (?, ?, ?) ON CONFLICT (node) DO UPDATE SET"
                " sent = sent + excluded.sent, received = received + excluded.received",
                (self.node, self.added.sent, self.added.received),
            )


@dataclass
class Traffic:
    """Traffic by member and by node, read once and mirrored in memory."""

    _processes: dict[str, dict[str, dict[str, Bytes]]] = field(default_factory=dict)
    """Job -> member -> incarnation -> its newest counters."""
    _nodes: dict[str, Bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, database: Database) -> Traffic:
        """Return what a database holds."""
        found = cls()
        rows = database.read_now(
            lambda connection: connection.execute("SELECT * FROM traffic").fetchall()
        )
        for job, member, incarnation, sent, received in rows:
            members = found._processes.setdefault(job, {})
            members.setdefault(member, {})[incarnation] = Bytes(sent, received)
        nodes = database.read_now(
            lambda connection: connection.execute("SELECT * FROM node_traffic").fetchall()
        )
        found._nodes = {node: Bytes(sent, received) for node, sent, received in nodes}
        return found

    def of_member(self, job: str, member: str) -> Bytes:
        """Return what all processes of a member have sent and received."""
        return sum(self._processes.get(job, {}).get(member, {}).values(), Bytes())

    def of_job(self, job: str) -> Bytes:
        """Return what all members of a job have sent and received, those that left included."""
        members = self._processes.get(job, {})
        return sum((self.of_member(job, member) for member in members), Bytes())

    def of_node(self, node: str) -> Bytes:
        """Return what members have sent and received on a node, in all its jobs."""
        return self._nodes.get(node, Bytes())

    def totals(
        self, job: str, member: str, incarnation: str, points: Sequence[Point]
    ) -> Sequence[Point]:
        """Return points of a process with the member's totals in the place of its counters."""
        own = self._processes.get(job, {}).get(member, {})
        past = sum((count for name, count in own.items() if name != incarnation), Bytes())
        if past == Bytes():
            return points
        return [_plus(point, {SENT: past.sent, RECEIVED: past.received}) for point in points]

    def growth(
        self, job: str, member: str, incarnation: str, *, node: str, points: Sequence[Point]
    ) -> Growth | None:
        """Return what new points of a process add; None: they count no bytes."""
        known = self._processes.get(job, {}).get(member, {}).get(incarnation, Bytes())
        counters = Bytes(
            _newest(points, SENT, known.sent), _newest(points, RECEIVED, known.received)
        )
        if counters == known:
            return None
        return Growth(
            job=job, member=member, incarnation=incarnation, node=node, counters=counters,
            added=counters - known,
        )  # fmt: skip

    def count(self, growth: Growth) -> None:
        """Count what was stored."""
        members = self._processes.setdefault(growth.job, {})
        members.setdefault(growth.member, {})[growth.incarnation] = growth.counters
        if growth.node:
            self._nodes[growth.node] = self.of_node(growth.node) + growth.added

    def forget(self, job: str) -> None:
        """Drop a deleted job; its nodes keep what they sent for it."""
        self._processes.pop(job, None)


def _newest(points: Sequence[Point], name: str, known: float) -> float:
    counts = (point.values.get(name, -1.0) for point in points)
    return max((count for count in counts if 0.0 <= count <= MOST_BYTES), default=known)


def _plus(point: Point, past: Mapping[str, float]) -> Point:
    counted = {name: value + past[name] for name, value in point.values.items() if name in past}
    return msgspec.structs.replace(point, values=point.values | counted) if counted else point
