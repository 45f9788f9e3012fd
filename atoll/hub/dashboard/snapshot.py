"""Snapshots of the hub, made once per tick for all open dashboards.

A page gets a full snapshot first, then deltas: rows of nodes and jobs with their key and changed
fields. Ages are rounded coarsely, so that idle nodes cause no delta.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.hub.http.context import Context
from atoll.hub.http.jobs import view_of
from atoll.hub.http.views import job_row
from atoll.hub.observability.events import EVERYWHERE
from atoll.hub.rounds.node_value import node_value
from atoll.ids import spoken

logger = logging.getLogger(__name__)

INTERVAL_S = 0.4

_LATE_S = 0.002
"""Margin for timers that fire early, which would return the old snapshot."""

QUEUES_EVERY_S = 2.0
WORTH_EVERY_S = 2.0
OVER_FOR_S = 10.0
"""How long the row of an ended job is cached."""

FIRST_EVENTS = 200
EVENTS_PER_TICK = 500
JOBS_LISTED = 200

Row = dict[str, Any]
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Snapshot:
    """The hub at one moment. `delta` is relative to snapshot `number - 1`.

    Numbers begin at the time in milliseconds, faster than snapshots are made, so that no number
    that a page knows from before a restart is used again.
    """

    number: int
    made: float
    content: dict[str, Any]
    delta: bytes
    shared: dict[tuple[object, ...], asyncio.Future[Any]] = field(default_factory=dict)
    """Results shared by all clients of a job at this tick."""
    _full: bytes = b""

    def bytes_after(self, number: int) -> bytes:
        """Return the JSON that updates a client from snapshot `number` to this one."""
        if number == self.number:
            return _encode({"full": False, "number": number, "time": self.content["time"]})
        if number == self.number - 1:
            return self.delta
        self._full = self._full or _encode({"full": True, **self.content})
        return self._full

    async def once(self, key: tuple[object, ...], make: Callable[[], Awaitable[Any]]) -> Any:
        """Return the result of `make`, computed once per snapshot and key."""
        found = self.shared.get(key)
        if found is None:
            found = self.shared[key] = asyncio.ensure_future(make())
        return await asyncio.shield(found)


class SnapshotSource:
    """Makes snapshots on demand, at most one per `INTERVAL_S`."""

    def __init__(self, context: Context) -> None:
        self._context = context
        # Clients that ask in the same tick wait for one snapshot instead of making several.
        self._lock = asyncio.Lock()
        self._picture: Snapshot | None = None
        self._nodes: dict[str, Row] = {}
        self._jobs: dict[str, Row] = {}
        self._over: dict[str, tuple[float, Row]] = {}
        self._worths: dict[str, tuple[float, Row]] = {}
        self._queues: list[Row] = []
        self._queues_at = float("-inf")

    def pause_s(self) -> float:
        """Return the seconds until the next snapshot is due."""
        return INTERVAL_S - asyncio.get_running_loop().time() % INTERVAL_S + _LATE_S

    async def current(self) -> Snapshot:
        """Return the snapshot of this tick."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            before = self._picture
            if before is None or now // INTERVAL_S > before.made // INTERVAL_S:
                self._picture = await self._make(now)
            assert self._picture is not None
            return self._picture

    async def worth(self, job: str, now: float) -> Row:
        """Return the value of each node of a job, cached for `WORTH_EVERY_S`."""
        until, worth = self._worths.get(job, (0.0, {}))
        stores = self._context.stores
        if stores.jobs.get(job).spec.parts_saved:  # its stages tell
            return {}
        if now >= until:
            if len(self._worths) > JOBS_LISTED:
                self._worths.clear()
            worth = await node_value(stores.jobs, stores.database, job)
            self._worths[job] = (now + WORTH_EVERY_S, worth)
        return worth

    async def _make(self, now: float) -> Snapshot:
        stores = self._context.stores
        nodes = {row["node"]: _node_row(row) for row in self._context.live.nodes()}
        jobs = {row["job"]: row for row in self._job_rows(now)}
        if now >= self._queues_at:
            self._queues = [
                row | {"oldest_s": coarse_age(row["oldest_s"])} for row in await stores.queue.rows()
            ]
            self._queues_at = now + QUEUES_EVERY_S
        events = await self._events()
        before = self._picture
        number = before.number + 1 if before is not None else int(1000 * self._context.clock.wall())
        content = {
            "number": number,
            "time": self._context.clock.wall(),
            "nodes": list(nodes.values()),
            "jobs": list(jobs.values()),
            "alarms": stores.alarms.open(),
            "queues": self._queues,
            "hub_events": events,
        }
        delta: dict[str, Any] = {"full": False, "number": number, "time": content["time"]}
        if before is not None:
            delta |= {
                "nodes": _changed("node", self._nodes, nodes),
                "jobs": _changed("job", self._jobs, jobs),
                "gone": {"nodes": _gone(self._nodes, nodes), "jobs": _gone(self._jobs, jobs)},
            }
            for name in ("alarms", "queues"):
                if content[name] != before.content[name]:
                    delta[name] = content[name]
            last = before.content["hub_events"][-1:]
            delta["hub_events"] = [e for e in events if not last or e["id"] > last[0]["id"]]
        self._nodes, self._jobs = nodes, jobs
        return Snapshot(number, now, content, _encode(delta))

    def _job_rows(self, now: float) -> Iterable[Row]:
        fresh: dict[str, tuple[float, Row]] = {}
        for job in self._context.stores.jobs.list()[:JOBS_LISTED]:
            until, row = self._over.get(job.job, (0.0, {}))
            if not (job.over and now < until and row["state"] == job.state):
                row = job_row(view_of(self._context, job.job))
                until = now + OVER_FOR_S
            if job.over:
                fresh[job.job] = (until, row)
            yield row
        self._over = fresh

    async def _events(self) -> list[Row]:
        events, kept = self._context.stores.events, self._picture
        if kept is None:
            return self._spoken(await events.tail(EVERYWHERE, limit=FIRST_EVENTS))
        known: list[Row] = kept.content["hub_events"]
        after = known[-1]["id"] if known else 0
        news = self._spoken(await events.read(EVERYWHERE, after=after, limit=EVENTS_PER_TICK))
        return [*known, *news][-FIRST_EVENTS:] if len(news) < FIRST_EVENTS else news

    def _spoken(self, events: list[Row]) -> list[Row]:
        """Return events of all jobs with machines by the names that people gave them."""
        jobs = self._context.stores.jobs
        nodes = {
            job: {one.member: one.node for one in jobs.get(job).processes}
            for job in {event["job"] for event in events}
            if jobs.knows(job)
        }
        return [
            event | {"text": spoken(event["text"], nodes[event["job"]], member=event["member"])}
            if event["job"] in nodes
            else event
            for event in events
        ]


def coarse_age(seconds: float | None) -> int | None:
    """Return an age in steps that grow with it; 0: just now."""
    if seconds is None:
        return None
    step = next(s for limit, s in _STEPS if seconds < limit)
    return int(seconds // step * step)


_STEPS = ((6.0, 6), (60.0, 5), (3_600.0, 60), (float("inf"), 3_600))


def coarse_members(view: Row) -> Row:
    """Return the view of a job without its spec and with coarse ages."""
    members = [m | {"last_seen_s": coarse_age(m["last_seen_s"])} for m in view["members"]]
    return {k: v for k, v in view.items() if k != "spec"} | {"members": members}


def _node_row(row: Row) -> Row:
    return row | {"last_seen_s": coarse_age(row["last_seen_s"])}


def _changed(key: str, before: Mapping[str, Row], now: Mapping[str, Row]) -> list[Row]:
    changed = []
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            changed.append(row)
        elif row is not old and row != old:
            new = {k: v for k, v in row.items() if k not in old or old[k] != v}
            changed.append({key: name, **new})
    return changed


def _gone(before: Mapping[str, Row], now: Mapping[str, Row]) -> list[str]:
    return [name for name in before if name not in now]
