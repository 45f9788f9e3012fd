"""Server-sent events for the dashboard: once a second, all that is new.

A client gets one tick at a time and the next is made only when the last has left, so a slow client
costs the memory of one tick. One that takes none for `SEND_TIMEOUT_S` is dropped; its browser
comes back by itself and goes on from the last tick it saw, whose id holds the cursors.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.errors import HubError
from atoll.hub.context import Context
from atoll.hub.endpoint import Refused
from atoll.hub.metrics import HELD_OUT_LOSS, HELD_OUT_LOSS_SUM, HELD_OUT_TOKENS
from atoll.hub.rest_hub import rss_bytes
from atoll.hub.rest_jobs import view_of
from atoll.hub.views import job_row

INTERVAL_S = 1.0
SEND_TIMEOUT_S = 10.0
MAX_STREAMS = 32
"""Dashboards open at once."""

POINTS_PER_TICK = 2_000
LINES_PER_TICK = 500
_FIRST_LINES = 200
_JOBS_LISTED = 100
_SHOWN = ("loss", "tokens_per_s", HELD_OUT_LOSS, HELD_OUT_LOSS_SUM, HELD_OUT_TOKENS)

_encode = msgspec.json.Encoder().encode


class Streams:
    """All open streams of one hub; makes the handler of `/api/stream`."""

    def __init__(self) -> None:
        self.open = 0

    async def answer(self, request: Request, context: Context) -> Response:
        """GET /api/stream?job=J: ticks until the client goes."""
        if self.open >= MAX_STREAMS:
            raise Refused(
                503,
                HubError(
                    "too many dashboards are open",
                    given=self.open,
                    expected=f"at most {MAX_STREAMS}",
                    remedy="close some",
                ),
            )
        job = request.query_params.get("job", "")
        if not context.stores.jobs.knows(job):
            job = ""
        cursors = Cursors.read(request.headers.get("last-event-id", ""), job)
        return _Stream(self, context, job, cursors)


class Cursors:
    """The ids of the last point, event, round and line that a client has of a job."""

    __slots__ = ("events", "job", "lines", "points", "rounds")

    def __init__(self, job: str) -> None:
        self.job = job
        self.points = self.events = self.rounds = 0
        self.lines = -1
        """-1: no line yet; the client starts with the last few."""

    @classmethod
    def read(cls, text: str, job: str) -> Cursors:
        """Return the cursors in an event id; fresh ones when it is of another job or no id."""
        cursors = cls(job)
        name, _, numbers = text.rpartition(":")
        with contextlib.suppress(ValueError):
            points, events, rounds, lines = (int(part) for part in numbers.split(","))
            if name == job:
                cursors.points, cursors.events = points, events
                cursors.rounds, cursors.lines = rounds, lines
        return cursors

    def __str__(self) -> str:
        return f"{self.job}:{self.points},{self.events},{self.rounds},{self.lines}"


class _Stream(Response):
    """The answer that goes on."""

    media_type = "text/event-stream"

    def __init__(self, streams: Streams, context: Context, job: str, cursors: Cursors) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._streams = streams
        self._context = context
        self._job = job
        self._cursors = cursors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send ticks until the client goes, or takes none for too long."""
        self._streams.open += 1
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not gone.done():
                more = await self._send_tick(send)
                await asyncio.wait([gone], timeout=0.0 if more else INTERVAL_S)
        except TimeoutError:
            return  # without the last chunk: the server closes the connection
        finally:
            self._streams.open -= 1
            gone.cancel()

    async def _send_tick(self, send: Send) -> bool:
        """Send one tick; return whether more is there already."""
        tick, more = await make_tick(self._context, self._job, self._cursors)
        text = b"id: %s\ndata: %s\n\n" % (str(self._cursors).encode(), _encode(tick))
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": text, "more_body": True})
        return more


async def make_tick(context: Context, job: str, cursors: Cursors) -> tuple[dict[str, Any], bool]:
    """Return what changed since the cursors, which move on, and whether more is there."""
    stores, now = context.stores, context.clock.wall()
    views = [view_of(context, record.job) for record in stores.jobs.list()[:_JOBS_LISTED]]
    tick: dict[str, Any] = {
        "time": now,
        "hub": {
            "version": context.version,
            "uptime_s": now - context.started,
            "rss_bytes": rss_bytes(),
            "ticket": context.ticket,
        },
        "nodes": context.live.nodes(),
        "jobs": [job_row(view) for view in views],
    }
    if not job:
        return tick, False
    points = await stores.metrics.read(job, after=cursors.points, limit=POINTS_PER_TICK)
    events = await stores.events.read(job, after=cursors.events, limit=LINES_PER_TICK)
    rounds = await context.live.rounds(job, after=cursors.rounds, limit=LINES_PER_TICK)
    if cursors.lines < 0:
        lines = await stores.logs.tail(job, limit=_FIRST_LINES)
        cursors.lines = 0
    else:
        lines = await stores.logs.read(job, after=cursors.lines, limit=LINES_PER_TICK)
    cursors.points = points[-1]["id"] if points else cursors.points
    cursors.events = events[-1]["id"] if events else cursors.events
    cursors.rounds = rounds[-1]["id"] if rounds else cursors.rounds
    cursors.lines = lines[-1]["id"] if lines else cursors.lines
    tick |= {
        "job": view_of(context, job),
        "points": [_slim(point) for point in points],
        "events": events,
        "rounds": rounds,
        "lines": lines,
    }
    full = len(points) == POINTS_PER_TICK or LINES_PER_TICK in (len(events), len(rounds))
    return tick, full


def _slim(point: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a point that charts show."""
    values = point["values"]
    point["values"] = {name: values[name] for name in _SHOWN if name in values}
    return point


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
