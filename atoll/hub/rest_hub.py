"""The hub itself over REST: who is here, how the hub is."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import HubError, unknown
from atoll.hub.context import Context
from atoll.hub.endpoint import Json, Refused, body_as, identity_of
from atoll.wire.messages import Drain


async def show_nodes(_request: Request, context: Context) -> Response:
    """GET /api/nodes: every known machine."""
    return Json(context.live.nodes())


class Draining(msgspec.Struct, frozen=True):
    """Body of a wish about a node."""

    draining: bool = True
    """False: it takes work again."""
    reason: str = ""


async def drain(request: Request, context: Context) -> Response:
    """POST /api/nodes/NODE/drain: have a machine give its work back and take none."""
    body = await body_as(request, Draining)
    node = request.path_params["node"]
    known = [view["node"] for view in context.live.nodes()]
    if node not in known:
        raise Refused(404, unknown("node", node, known))
    connected = next(v for v in context.live.nodes() if v["node"] == node)["state"] != "lost"
    if not connected or not context.tell(node, Drain(body.draining, body.reason[:200])):
        raise HubError(
            "this node is not connected",
            given=node,
            expected="a node that `atoll status` shows as online",
            remedy="it runs nothing that could be drained; try again when it is back",
        )
    return Json({"node": node, "draining": body.draining})


async def show_hub(request: Request, context: Context) -> Response:
    """GET /api/hub: version, uptime, memory; for the operator the ticket too."""
    answer = {
        "version": context.version,
        "time": context.clock.wall(),
        "started": context.started,
        "uptime_s": context.clock.wall() - context.started,
        "rss_bytes": rss_bytes(),
        "nodes": len(context.live.nodes()),
        "jobs": len(context.stores.jobs.list()),
        "relay": context.live.relay(),
    }
    role = identity_of(request).role
    answer["role"] = role
    if role == "operator":
        answer["ticket"] = context.ticket
    return Json(answer)


async def show_events(request: Request, context: Context) -> Response:
    """GET /api/events: what happened to the hub and its nodes."""
    events = await context.stores.events.read("", after=0, limit=1000)
    return Json({"last": events[-1]["id"] if events else 0, "events": events})


async def health(_request: Request, _context: Context) -> Response:
    """GET /healthz: the hub answers."""
    return Json({"ok": True})


def rss_bytes() -> int:
    """Return how much memory this process occupies."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        import psutil  # only where /proc is not: it costs memory that a hub can save

        return int(psutil.Process().memory_info().rss)
