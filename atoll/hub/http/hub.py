"""REST handlers of the hub itself, its nodes, the rendezvous of islands, and history."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll import system
from atoll.errors import ConfigError, HubError, unknown
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import (
    HttpRefused,
    Json,
    audit_more,
    body_as,
    compressed,
    forbidden,
    identity_of,
    number,
)
from atoll.hub.http.jobs import job_of, view_of
from atoll.hub.observability.history import HOUR_S
from atoll.ids import is_follower, member_of_follower
from atoll.wire.messages import Drain, RendezvousAddress
from atoll.wire.states import JobState, NodeState


async def show_nodes(_request: Request, context: Context) -> Response:
    """GET /api/nodes: every known node."""
    return Json(context.live.nodes())


class DrainRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/nodes/NODE/drain."""

    draining: bool = True
    """False: accept work again."""
    reason: str = ""


async def drain(request: Request, context: Context) -> Response:
    """POST /api/nodes/NODE/drain: move a node's work away and assign it no more."""
    body = await body_as(request, DrainRequest)
    audit_more(request, action="drain" if body.draining else "undrain")
    node = request.path_params["node"]
    known = [view["node"] for view in context.live.nodes()]
    if node not in known:
        raise HttpRefused(404, unknown("node", node, known))
    connected = (
        next(v for v in context.live.nodes() if v["node"] == node)["state"] != NodeState.LOST
    )
    if not connected or not context.tell(node, Drain(body.draining, body.reason[:200])):
        raise HubError(
            "this node is not connected",
            given=node,
            expected="a node that `atoll status` shows as online",
            remedy="it runs nothing that could be drained; try again when it is online",
        )
    return Json({"node": node, "draining": body.draining})


async def show_hub(request: Request, context: Context) -> Response:
    """GET /api/hub: version, uptime, memory; also the ticket for an operator."""
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
    """GET /api/events?after=ID: events of the hub and its nodes, oldest first.

    Without `after` the newest 1000.
    """
    after, stored = int(number(request, "after", 0)), context.stores.events
    events = await (stored.read("", after=after) if after else stored.tail("", limit=1000))
    return Json({"last": events[-1]["id"] if events else after, "events": events})


async def health(_request: Request, _context: Context) -> Response:
    """GET /healthz: liveness check."""
    return Json({"ok": True})


def rss_bytes() -> int:
    """Return the resident memory of this process."""
    known = system.resident_bytes()
    if known is not None:
        return known
    import psutil  # takes memory

    return int(psutil.Process().memory_info().rss)


LONGEST = 255
"""Maximum characters of a rendezvous address and of its secret."""


async def publish_rendezvous(request: Request, context: Context) -> Response:
    """PUT /api/jobs/J/rendezvous/M: publish the rendezvous address for followers of member M."""
    job, member = job_of(request, context), _member_of(request)
    asking, record = identity_of(request), context.stores.jobs.get(job)
    newest = record.members.get(member)
    if asking.member != member or (newest is not None and asking.attempt < newest.attempt):
        raise forbidden(asking)
    if record.state != JobState.RUNNING:
        raise HubError("the job is not running", given=job, expected="a member of a running job")
    address = await body_as(request, RendezvousAddress)
    if not 0 < len(address.dial) <= LONGEST or not 0 < len(address.secret) <= LONGEST:
        raise ConfigError(
            "this is not a rendezvous address",
            given=f"dial of {len(address.dial)} and secret of {len(address.secret)} characters",
            expected=f"1 to {LONGEST} of each",
        )
    context.rendezvous.open(job, member, address)
    return Json({})


async def find_rendezvous(request: Request, context: Context) -> Response:
    """GET /api/jobs/J/rendezvous/M: return that address."""
    job, member = job_of(request, context), _member_of(request)
    asking = identity_of(request).member
    if member != (member_of_follower(asking)[0] if is_follower(asking) else asking):
        raise forbidden(identity_of(request))
    address = context.rendezvous.get(job, member)
    if address is None:
        raise HttpRefused(404, HubError("no rendezvous is published", given=f"{job}/{member}"))
    return Json(address)


def _member_of(request: Request) -> str:
    member: str = request.path_params["member"]
    return member


MAX_POINTS = 2_000


async def show_history(request: Request, context: Context) -> Response:
    """GET /api/history: `owner=O&from=T&to=T&points=N` for buckets, or `job=J&points=N`.

    `owner` is `node/NAME` or `JOB/MEMBER`; Unix times, by default the last hour. With `job` the
    response is that of the metrics, thinned to `points` per member, and the job's `view` without
    its spec, so that a page draws both at once; readers continue from `last`.
    """
    points = int(number(request, "points", 300, low=2, high=MAX_POINTS))
    job, owner = request.query_params.get("job", ""), request.query_params.get("owner", "")
    if job:
        return await _curves(request, context, job, points)
    if not owner:
        raise ConfigError(
            "the owner of the history is missing",
            given="no owner",
            expected="owner=node/NAME, owner=JOB/w0 or job=J",
        )
    until = number(request, "to", context.clock.wall())
    since = number(request, "from", until - HOUR_S)
    found = await context.stores.history.read(owner, since=since, until=until, points=points)
    return compressed(request, found | {"from": since, "to": until})


async def _curves(request: Request, context: Context, job: str, points: int) -> Response:
    if not context.stores.jobs.knows(job):
        raise HttpRefused(404, HubError("there is no such job", given=repr(job[:100])))
    found = await context.stores.metrics.curves(job, points=points)
    view = {name: value for name, value in view_of(context, job).items() if name != "spec"}
    last = found[-1]["id"] if found else 0
    return compressed(request, {"last": last, "points": found, "view": view})
