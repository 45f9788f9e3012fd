"""The durable record of rounds: plans and verdicts by epoch, and `rounds.json` for the report."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from atoll.clock import Clock
from atoll.errors import AtollError
from atoll.hub.db.database import Database
from atoll.hub.jobs.jobs import Jobs, Member, Write
from atoll.hub.jobs.times import note_time
from atoll.hub.rounds import timeline as timelines
from atoll.hub.rounds.node_value import marginal_throughput
from atoll.hub.rounds.timeline import Completed, Row, find_catch_up, row_view
from atoll.rounds.data_slots import Cursor
from atoll.rounds.effects import Decided, Planned
from atoll.wire.messages import RoundJoin, RoundPlan, Verdict

log = logging.getLogger(__name__)

NAME = "rounds.json"
NEWEST = 300


def write_rounds(connection: sqlite3.Connection, job: str, *, folder: Path, alone: bool) -> None:
    """Write `rounds.json` atomically, in the database's reader thread; errors are logged only."""
    rounds = find_catch_up(connection, job, newest=NEWEST)
    if not rounds or not folder.is_dir():
        return
    rows = [
        {
            "round": one.round, "time": one.time, "seconds": one.seconds, "route": one.route,
            "contributors": one.contributors, "timeline": [row_view(row) for row in one.rows],
        }
        for one in rounds
    ]  # fmt: skip
    path = folder / NAME
    scratch = path.with_name(NAME + ".part")
    try:
        scratch.write_text(
            json.dumps({"rounds": rows, "worth": marginal_throughput(rounds, alone=alone)}) + "\n",
            encoding="utf-8",
            newline="\n",
        )
        scratch.replace(path)
    except OSError as error:
        log.warning("%s: %s was not written: %s", job, NAME, error)


SCHEMA = (
    """
CREATE TABLE IF NOT EXISTS rounds (
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    round INTEGER NOT NULL,
    plan BLOB NOT NULL,
    planned REAL NOT NULL,
    verdict BLOB,
    decided REAL,
    seconds REAL,
    nbytes INTEGER,
    PRIMARY KEY (job, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS round_leases (
    job TEXT NOT NULL,
    round INTEGER NOT NULL,
    cursors BLOB NOT NULL,
    PRIMARY KEY (job, round)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS open_joins (
    job TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    joins BLOB NOT NULL,
    PRIMARY KEY (job, epoch)
) WITHOUT ROWID;
"""
    + timelines.SCHEMA
)

_encoder = msgspec.msgpack.Encoder()
_plans = msgspec.msgpack.Decoder(RoundPlan)
_verdicts = msgspec.msgpack.Decoder(Verdict)
_joins = msgspec.msgpack.Decoder(dict[str, RoundJoin])
_cursors = msgspec.msgpack.Decoder(dict[int, Cursor])


class RoundStore:
    """Reads and writes the table of rounds: a full disk delays a round but must not fork it."""

    def __init__(self, *, database: Database, jobs: Jobs, clock: Clock) -> None:
        self._database = database
        self._jobs = jobs
        self._clock = clock

    async def newest(self, job: str, *, limit: int) -> list[tuple[RoundPlan, Verdict | None]]:
        """Return the newest attempts of a job, newest first."""

        def load(connection: sqlite3.Connection) -> list[tuple[bytes, bytes | None]]:
            return connection.execute(
                "SELECT plan, verdict FROM rounds WHERE job = ? ORDER BY epoch DESC LIMIT ?",
                (job, limit),
            ).fetchall()

        return [
            (_plans.decode(plan), None if verdict is None else _verdicts.decode(verdict))
            for plan, verdict in await self._database.read(load)
        ]

    async def abandon(self, job: str) -> None:
        """Abort attempts of a previous run that have no verdict."""

        def write(connection: sqlite3.Connection) -> None:
            rows = connection.execute(
                "SELECT epoch, round FROM rounds WHERE job = ? AND verdict IS NULL", (job,)
            ).fetchall()
            for epoch, round_ in rows:
                verdict = Verdict(round_, epoch, False, reason="the job was started again")
                connection.execute(
                    "UPDATE rounds SET verdict = ?, decided = planned, seconds = 0, nbytes = 0"
                    " WHERE job = ? AND epoch = ?",
                    (_encoder.encode(verdict), job, epoch),
                )

        await self._database.write(write)

    def members(self, job: str) -> dict[str, Member]:
        """Return the member records of a job."""
        return self._jobs.get(job).members

    async def add_plan(self, planned: Planned, *, completed: Completed | None = None) -> None:
        """Store a plan, its joins, and updated timelines of the previous round, durably."""
        plan = planned.plan
        row = (plan.job, plan.epoch, plan.round, _encoder.encode(plan), self._clock.wall())
        joins = _encoder.encode(dict(planned.joins))
        rows = timelines.encode(completed.rows) if completed is not None else b""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO rounds (job, epoch, round, plan, planned) VALUES (?, ?, ?, ?, ?)", row
            )
            connection.execute(
                "INSERT OR REPLACE INTO open_joins (job, epoch, joins) VALUES (?, ?, ?)",
                (plan.job, plan.epoch, joins),
            )
            if completed is not None:
                timelines.store(connection, plan.job, completed.epoch, rows)

        await self._jobs.write_when_room(plan.job, lambda: write)

    async def joins_of(self, plan: RoundPlan) -> dict[str, RoundJoin]:
        """Return the joins of an attempt without verdict."""

        def find(connection: sqlite3.Connection) -> tuple[bytes] | None:
            return cast(
                "tuple[bytes] | None",
                connection.execute(
                    "SELECT joins FROM open_joins WHERE job = ? AND epoch = ?",
                    (plan.job, plan.epoch),
                ).fetchone(),
            )

        row = await self._database.read(find)
        return _joins.decode(row[0]) if row else {}

    async def add_verdict(
        self, job: str, decided: Decided, *, nbytes: int, timeline: Sequence[Row] = ()
    ) -> None:
        """Store a verdict with progress, leases, timings and timeline, in one transaction."""
        verdict, record = decided.verdict, self._jobs.get(job)
        record.measures = decided.timings
        if verdict.committed:
            record.committed_round = verdict.round + 1
            record.leases = dict(decided.cursors)
            for member in decided.contributed:
                if member in record.members:
                    record.members[member].failures = 0
        else:
            record.aborted_rounds += 1
        row = (_encoder.encode(verdict), self._clock.wall(), decided.seconds, nbytes)
        cursors = _encoder.encode(record.leases) if record.leases else b""
        rows = timelines.encode(timeline)

        def prepare() -> Write:
            store_record = self._jobs.storing(job)

            def write(connection: sqlite3.Connection) -> None:
                connection.execute(
                    "UPDATE rounds SET verdict = ?, decided = ?, seconds = ?, nbytes = ?"
                    " WHERE job = ? AND epoch = ?",
                    (*row, job, verdict.epoch),
                )
                connection.execute(
                    "DELETE FROM open_joins WHERE job = ? AND epoch <= ?", (job, verdict.epoch)
                )
                if verdict.committed and cursors:
                    connection.execute(
                        "INSERT OR REPLACE INTO round_leases (job, round, cursors)"
                        " VALUES (?, ?, ?)",
                        (job, verdict.round + 1, cursors),
                    )
                if timeline:
                    timelines.store(connection, job, verdict.epoch, rows)
                    timelines.thin(connection, job, verdict.epoch, members=len(timeline))
                store_record(connection)

            return write

        await self._jobs.write_when_room(job, prepare)

    async def set_round(
        self, job: str, round_: int, cursors: dict[int, Cursor], **changes: Any
    ) -> None:
        """Set committed rounds, data cursors and other fields of the record without a verdict."""
        record = self._jobs.get(job)
        record.committed_round, record.leases = round_, dict(cursors)
        for name, value in changes.items():
            setattr(record, name, value)
        await self._jobs.write_when_room(job, lambda: self._jobs.storing(job))

    async def forget_leases(self, job: str) -> None:
        """Delete the data cursors of all rounds; slots are assigned differently from now on."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM round_leases WHERE job = ?", (job,))

        await self._jobs.write_when_room(job, lambda: write)

    async def set_paused(self, job: str, reason: str) -> None:
        """Store why a job is paused; empty: it is not."""
        record = self._jobs.get(job)
        record.paused = reason
        note_time(record, self._clock.wall())
        await self._jobs.write_when_room(job, lambda: self._jobs.storing(job))

    async def cursors_at(self, job: str, round_: int) -> dict[int, Cursor]:
        """Return the data cursors after this many rounds; empty: the beginning."""

        def find(connection: sqlite3.Connection) -> tuple[bytes] | None:
            return cast(
                "tuple[bytes] | None",
                connection.execute(
                    "SELECT cursors FROM round_leases WHERE job = ? AND round = ?", (job, round_)
                ).fetchone(),
            )

        row = await self._database.read(find)
        return _cursors.decode(row[0]) if row else {}

    async def verdict(self, job: str, epoch: int) -> Verdict | None:
        """Return the stored verdict on an attempt, if any."""

        def find(connection: sqlite3.Connection) -> tuple[bytes | None] | None:
            return cast(
                "tuple[bytes | None] | None",
                connection.execute(
                    "SELECT verdict FROM rounds WHERE job = ? AND epoch = ?", (job, epoch)
                ).fetchone(),
            )

        row = await self._database.read(find)
        return _verdicts.decode(row[0]) if row and row[0] is not None else None

    async def members_of(self, job: str, committed_round: int) -> list[str]:
        """Return the members of the attempt that committed round `committed_round - 1`."""

        def find(connection: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
            return connection.execute(
                "SELECT plan, verdict FROM rounds WHERE job = ? AND round = ?"
                " AND verdict IS NOT NULL ORDER BY epoch DESC",
                (job, committed_round - 1),
            ).fetchall()

        for plan, verdict in await self._database.read(find):
            if _verdicts.decode(verdict).committed:
                return _plans.decode(plan).members
        return []

    async def history(self, job: str, *, after: int, limit: int) -> list[dict[str, Any]]:
        """Return decided attempts with an epoch above `after`, oldest first."""

        def find(connection: sqlite3.Connection) -> list[tuple[Any, ...]]:
            return connection.execute(
                "SELECT r.plan, r.verdict, r.decided, r.seconds, r.nbytes, t.members"
                " FROM rounds r LEFT JOIN round_timelines t ON t.job = r.job AND t.epoch = r.epoch"
                " WHERE r.job = ? AND r.epoch > ? AND r.verdict IS NOT NULL"
                " ORDER BY r.epoch LIMIT ?",
                (job, after, limit),
            ).fetchall()

        return [_describe(*row) for row in await self._database.read(find)]

    async def sum_up(self, job: str) -> None:
        """Write `rounds.json` to the job's folder; failures are logged."""
        alone = self._jobs.get(job).spec.alone
        folder = self._jobs.folder(job)
        try:
            await self._database.read(
                lambda connection: write_rounds(connection, job, folder=folder, alone=alone)
            )
        except AtollError as error:
            log.warning("%s is not summed up: %s", job, error)


def _describe(
    plan_bytes: bytes,
    verdict_bytes: bytes,
    decided: float,
    seconds: float,
    nbytes: int,
    timeline: bytes | None,
) -> dict[str, Any]:
    plan, verdict = _plans.decode(plan_bytes), _verdicts.decode(verdict_bytes)
    rows = timelines.views(timeline)
    return {
        "id": plan.epoch,
        "epoch": plan.epoch,
        "round": plan.round,
        "route": plan.route,
        "members": plan.members,
        "contributors": verdict.contributors,
        "committed": verdict.committed,
        "reason": verdict.reason,
        "seconds": seconds,
        "nbytes": timelines.round_bytes(plan.route, nbytes, rows),
        "time": decided,
        "timeline": rows,
    }
