"""Server-sent events of the dashboard, about two ticks per second.

Shared data are read once per tick for all clients. The next tick is made after the last was sent,
so a slow client costs the memory of one tick. One that accepts none for `SEND_TIMEOUT_S` is
dropped; its browser reconnects and continues from the cursors in the last event id.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.config.install import PACKAGE, one_line
from atoll.errors import HubError
from atoll.hub.dashboard.snapshot import Snapshot, SnapshotSource, coarse_members
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, identity_of
from atoll.hub.http.hub import rss_bytes
from atoll.hub.http.jobs import view_of
from atoll.hub.security.roles import Identity

SEND_TIMEOUT_S = 10.0
MAX_STREAMS = 32
MAX_OF_OTHERS = 24
MAX_OF_ONE = 12
"""Streams of all logins without the operator's role, and of one, so that others find a place."""

POINTS_PER_TICK = 2_000
LINES_PER_TICK = 500
FIRST_ROUNDS = 120
"""Attempts that a new client gets."""
_FIRST_LINES = 200
_FIRST_EVENTS = 300
ROUNDS_LATE_S = 3.0
"""How long after a verdict in memory its row is looked for in the database."""
_GZIP_WBITS = 31
MAX_ID = 2**63 - 1
"""Largest integer of SQLite."""
_encode = msgspec.json.Encoder().encode


class EventStreams:
    """All open streams of a hub; handles `/api/stream`."""

    def __init__(self) -> None:
        self.by_login: Counter[Identity] = Counter()
        self._snapshots: SnapshotSource | None = None

    async def answer(self, request: Request, context: Context) -> Response:
        """GET /api/stream?job=J&points=ID&since=N: ticks, compressed for clients that accept it.

        `points` is the last point that the client has of the job, `since` its last snapshot: a page
        that goes to another job does not get all machines again.
        """
        login = identity_of(request)
        if self._full(login):
            raise HttpRefused(
                503,
                HubError(
                    "too many dashboards are open",
                    given=self.open,
                    expected=f"at most {MAX_STREAMS}",
                    remedy="close some",
                ),
            )
        self._snapshots = self._snapshots or SnapshotSource(context)
        # A job may be deleted between its history and this: the first tick says so.
        job = request.query_params.get("job", "")
        cursors = Cursors.read(request.headers.get("last-event-id", ""), job)
        cursors.points = max(cursors.points, _number(request, "points"))
        feed = Feed(context, self._snapshots, cursors, role=login.role)
        feed.seen = _number(request, "since")
        compressed = "gzip" in request.headers.get("accept-encoding", "")
        return _Stream(self, feed, login, compressed=compressed)

    @property
    def open(self) -> int:
        """Number of open streams."""
        return self.by_login.total()

    def _full(self, login: Identity) -> bool:
        if login.role == "operator":
            return self.open >= MAX_STREAMS
        others = sum(n for one, n in self.by_login.items() if one.role != "operator")
        return others >= MAX_OF_OTHERS or self.by_login[login] >= MAX_OF_ONE


def _number(request: Request, name: str) -> int:
    """Return a number of the query; -1 if it is missing or none."""
    text = request.query_params.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else -1


class Cursors:
    """Ids of the last point, event, round and line of a job that a client has."""

    __slots__ = ("events", "job", "lines", "points", "rounds")

    def __init__(self, job: str) -> None:
        self.job = job
        self.points = 0
        self.events = self.rounds = self.lines = -1
        """-1: none yet; the client starts with the last few."""

    @classmethod
    def read(cls, text: str, job: str) -> Cursors:
        """Parse an event id; new cursors if it is invalid or of another job."""
        cursors = cls(job)
        name, _, numbers = text.rpartition(":")
        with contextlib.suppress(ValueError):
            points, events, rounds, lines = (int(part) for part in numbers.split(","))
            if name == job and max(points, events, rounds, lines) <= MAX_ID:
                cursors.points, cursors.events = points, events
                cursors.rounds, cursors.lines = rounds, lines
        return cursors

    def __str__(self) -> str:
        return f"{self.job}:{self.points},{self.events},{self.rounds},{self.lines}"


class Feed:
    """Makes the ticks of one client."""

    def __init__(
        self, context: Context, snapshots: SnapshotSource, cursors: Cursors, *, role: str
    ) -> None:
        self.cursors = cursors
        self.snapshots = snapshots
        self._context = context
        self._role = role
        self.seen = -1
        """Number of the last snapshot that the client has."""
        self._job: dict[str, Any] = {}
        self._worth: dict[str, Any] = {}
        self._round: dict[str, Any] = {}
        """The last round sent; it is sent again when its members report more at their next join."""
        self._verdicts = (-1, -1)
        self._rounds_until = 0.0

    async def tick(self) -> tuple[list[bytes], bool]:
        """Return one tick as JSON in three parts, and whether more is available already.

        The second part contains the ticket, and nothing that others may choose.
        """
        snapshot = await self.snapshots.current()
        own: dict[str, Any] = {}
        more, jobs, job = False, self._context.stores.jobs, self.cursors.job
        if job:
            try:
                if jobs.knows(job):
                    more = await self._add_job(own, snapshot)
            except HubError:
                if jobs.knows(job):
                    raise
            if not jobs.knows(job):  # deleted while its part was read, or before
                own, more, self.cursors = {"deleted": job}, False, Cursors("")
        shared = snapshot.bytes_after(self.seen)
        self.seen = snapshot.number
        hub = b',"hub":' + _encode(self._hub())
        return [shared[:-1], hub, (b"," if own else b"") + _encode(own)[1:]], more

    def _hub(self) -> dict[str, Any]:
        context = self._context
        hub: dict[str, Any] = {
            "version": context.version,
            "uptime_s": int(context.clock.wall() - context.started),
            "rss_bytes": rss_bytes(),
            "role": self._role,
        }
        if self._role == "operator":
            hub["ticket"] = context.ticket
            hub["package"], hub["join_line"] = PACKAGE, one_line(context.ticket)
        return hub

    async def _add_job(self, tick: dict[str, Any], snapshot: Snapshot) -> bool:
        """Add what is new of the shown job; return whether more is available already."""
        stores, cursors, job = self._context.stores, self.cursors, self.cursors.job

        async def view() -> dict[str, Any]:
            return coarse_members(view_of(self._context, job))

        shown = await snapshot.once(("view", job), view)
        if shown != self._job:
            self._job = tick["job"] = shown
        value = self.snapshots.worth
        worth = await snapshot.once(("worth", job), lambda: value(job, snapshot.made))
        if worth != self._worth:
            self._worth = tick["worth"] = worth
        points = await self._read(
            snapshot, "points", lambda a: stores.metrics.read(job, after=a, limit=POINTS_PER_TICK)
        )
        if cursors.events < 0:
            events = await stores.events.tail(job, limit=_FIRST_EVENTS)
            cursors.events = events[-1]["id"] if events else 0
        else:
            events = await self._read(
                snapshot, "events", lambda a: stores.events.read(job, after=a, limit=LINES_PER_TICK)
            )
        if cursors.lines < 0:
            lines = await stores.logs.tail(job, limit=_FIRST_LINES)
            cursors.lines = lines[-1]["id"] if lines else 0
        else:
            lines = await self._read(
                snapshot, "lines", lambda a: stores.logs.read(job, after=a, limit=LINES_PER_TICK)
            )
        rounds = await self._rounds(snapshot)
        tick |= {
            "points": points,
            "events": events,
            "rounds": rounds,
            "lines": lines,
        }
        full = len(points) == POINTS_PER_TICK or LINES_PER_TICK in (len(events), len(rounds))
        return full or len(lines) == LINES_PER_TICK

    async def _read(
        self,
        snapshot: Snapshot,
        name: str,
        read: Callable[[int], Awaitable[list[dict[str, Any]]]],
    ) -> list[dict[str, Any]]:
        after = getattr(self.cursors, name)
        key = (name, self.cursors.job, after)
        rows: list[dict[str, Any]] = await snapshot.once(key, lambda: read(after))
        if rows:
            setattr(self.cursors, name, rows[-1]["id"])
        return rows

    async def _rounds(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Return new decided attempts; the database is read only around verdicts."""
        cursors, live, now = self.cursors, self._context.live, snapshot.made
        record = self._context.stores.jobs.get(cursors.job)
        verdicts = (record.committed_round, record.aborted_rounds)
        if verdicts != self._verdicts:
            # The record changes in memory just before the row is on disk.
            self._verdicts, self._rounds_until = verdicts, now + ROUNDS_LATE_S
        if now > self._rounds_until:
            return []
        if cursors.rounds < 0:
            decided = record.committed_round - record.start_round + record.aborted_rounds
            cursors.rounds = max(0, decided - FIRST_ROUNDS)
        after = max(0, cursors.rounds - 1)
        rounds: list[dict[str, Any]] = await snapshot.once(
            ("rounds", cursors.job, after),
            lambda: live.rounds(cursors.job, after=after, limit=LINES_PER_TICK),
        )
        if len(rounds) == LINES_PER_TICK:
            self._rounds_until = now + ROUNDS_LATE_S
        news = [row for row in rounds if row != self._round]
        if news:
            self._round, cursors.rounds = rounds[-1], rounds[-1]["id"]
        return news


class _Stream(Response):
    media_type = "text/event-stream"

    def __init__(
        self, streams: EventStreams, feed: Feed, login: Identity, *, compressed: bool
    ) -> None:
        encoding = {"content-encoding": "gzip"} if compressed else {}
        super().__init__(
            headers={
                "cache-control": "no-store",
                "vary": "accept-encoding",
                "x-accel-buffering": "no",
                **encoding,
            }
        )
        del self.headers["content-length"]
        self._streams, self._feed, self._login = streams, feed, login
        self._gzip = zlib.compressobj(1, wbits=_GZIP_WBITS) if compressed else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send ticks until the client disconnects or accepts none for too long."""
        by_login = self._streams.by_login
        by_login[self._login] += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done():
                more = await self._send_tick(send)
                pause_s = 0.0 if more else self._feed.snapshots.pause_s()
                await asyncio.wait([gone], timeout=pause_s)
        except TimeoutError:
            return  # without the last chunk, so that the server closes the connection
        finally:
            by_login[self._login] -= 1
            if not by_login[self._login]:
                del by_login[self._login]
            gone.cancel()

    async def _send_tick(self, send: Send) -> bool:
        (first, *others), more = await self._feed.tick()
        begin = b"id: %s\ndata: %s" % (str(self._feed.cursors).encode(), first)
        body = b"".join(map(self._packed, (begin, *others, b"\n\n")))
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": body, "more_body": True})
        return more

    def _packed(self, part: bytes) -> bytes:
        """Return a part as it is sent.

        A full flush resets the compressor: lengths of parts with text that others choose reveal
        nothing of the ticket, which is in a part of its own.
        """
        if self._gzip is None:
            return part
        return self._gzip.compress(part) + self._gzip.flush(zlib.Z_FULL_FLUSH)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
