"""The table of alarms; open ones are cached in memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from atoll.errors import HubError
from atoll.hub.alarms.engine import Alarm, Changes, Finding, Identity
from atoll.hub.db.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS alarms (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL, severity TEXT NOT NULL, job TEXT NOT NULL, node TEXT NOT NULL,
    member TEXT NOT NULL, key TEXT NOT NULL, cause TEXT NOT NULL, remedy TEXT NOT NULL,
    value REAL, since REAL NOT NULL, seen REAL NOT NULL, ended REAL, silenced INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS alarms_ended ON alarms (ended, id);
"""

MAX_ENDED = 5_000

_COLUMNS = (
    "id, kind, severity, job, node, member, key, cause, remedy, value, since, seen, ended, silenced"
)


class Alarms:
    """Open and ended alarms."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._open: dict[Identity, Alarm] = {}
        self.on_silence: Callable[[Alarm], None] = lambda alarm: None
        """Called with an alarm when it is silenced or unsilenced."""

    async def load(self) -> list[Alarm]:
        """Load and return the alarms that were open when the hub stopped."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                f"SELECT {_COLUMNS} FROM alarms WHERE ended IS NULL ORDER BY id"
            ).fetchall()
        )
        found = [_alarm(row) for row in rows]
        self._open = {alarm.finding.identity: alarm for alarm in found}
        return found

    def open(self) -> list[dict[str, Any]]:
        """Return open alarms, newest first."""
        return [alarm.view() for alarm in sorted(self._open.values(), key=lambda a: -a.id)]

    async def all(self, *, limit: int = 500) -> list[dict[str, Any]]:
        """Return open and ended alarms, newest first."""
        rows = await self._database.read(
            lambda connection: connection.execute(
                f"SELECT {_COLUMNS} FROM alarms ORDER BY id DESC LIMIT ?", (limit,)
            ).fetchall()
        )
        return [_alarm(row).view() for row in rows]

    async def keep(self, changes: Changes) -> Changes:
        """Store changes; return them with the ids of new alarms."""

        def write(connection: sqlite3.Connection) -> list[int]:
            ids = [_insert(connection, alarm) for alarm in changes.opened]
            for alarm in [*changes.updated, *changes.ended]:
                _update(connection, alarm)
            if changes.ended:
                connection.execute(
                    "DELETE FROM alarms WHERE ended IS NOT NULL AND id <= (SELECT id FROM alarms"
                    " WHERE ended IS NOT NULL ORDER BY id DESC LIMIT 1 OFFSET ?)",
                    (MAX_ENDED,),
                )
            return ids

        ids = await self._database.write(write)
        opened = [replace(a, id=i) for a, i in zip(changes.opened, ids, strict=True)]
        for alarm in opened:
            self._open[alarm.finding.identity] = alarm
        for alarm in changes.updated:  # one may have been silenced meanwhile
            known = self._open.get(alarm.finding.identity, alarm)
            self._open[alarm.finding.identity] = replace(alarm, silenced=known.silenced)
        for alarm in changes.ended:
            self._open.pop(alarm.finding.identity, None)
        return Changes(opened, changes.updated, changes.ended)

    async def silence(self, id_: int, *, silenced: bool) -> Alarm:
        """Silence or unsilence an open alarm; raises HubError if it is not open."""
        alarm = next((a for a in self._open.values() if a.id == id_), None)
        if alarm is None:
            raise HubError(
                "there is no open alarm with this number",
                given=id_,
                remedy="`atoll alarms` lists those that are",
            )
        await self._database.write(
            lambda connection: connection.execute(
                "UPDATE alarms SET silenced = ? WHERE id = ?", (int(silenced), id_)
            )
        )
        known = self._open.get(alarm.finding.identity)
        if known is not None and known.id == id_:  # it may have been updated, or have ended
            self._open[alarm.finding.identity] = alarm = replace(known, silenced=silenced)
        else:
            alarm = replace(alarm, silenced=silenced)
        self.on_silence(alarm)
        return alarm


def _insert(connection: sqlite3.Connection, alarm: Alarm) -> int:
    found = alarm.finding
    (id_,) = connection.execute(
        "INSERT INTO alarms (kind, severity, job, node, member, key, cause, remedy, value, since,"
        " seen, silenced) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0) RETURNING id",
        (found.kind, found.severity, found.job, found.node, found.member, found.key, found.cause,
         found.remedy, found.value, alarm.since, alarm.seen),
    ).fetchone()  # fmt: skip
    return int(id_)


def _update(connection: sqlite3.Connection, alarm: Alarm) -> None:
    found = alarm.finding
    connection.execute(
        "UPDATE alarms SET severity = ?, cause = ?, remedy = ?, value = ?, seen = ?, ended = ?"
        " WHERE id = ?",
        (found.severity, found.cause, found.remedy, found.value, alarm.seen, alarm.ended, alarm.id),
    )


def _alarm(row: Sequence[Any]) -> Alarm:
    id_, kind, severity, job, node, member, key, cause, remedy, value, *rest = row
    since, seen, ended, silenced = rest
    finding = Finding(
        kind=kind, severity=severity, job=job, node=node, member=member, key=key, cause=cause,
        remedy=remedy, value=value,
    )  # fmt: skip
    return Alarm(id_, finding, since, seen, ended, bool(silenced))
