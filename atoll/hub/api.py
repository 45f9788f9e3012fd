"""Every address that the hub answers over HTTP, in one table."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from atoll.errors import HubError
from atoll.hub import (
    pages,
    rest_blobs,
    rest_files,
    rest_history,
    rest_hub,
    rest_jobs,
    rest_metrics,
    rest_queues,
)
from atoll.hub.auth import Role
from atoll.hub.context import Context, Live
from atoll.hub.endpoint import Endpoint, Handler, Refused
from atoll.hub.guard import guard
from atoll.hub.stream import Streams

Roles = tuple[Role, ...]

__all__ = ["Context", "Live", "guard", "routes"]


async def nothing_here(request: Request, _context: Context) -> Response:
    """Answer every other address."""
    raise Refused(404, HubError("there is nothing at this address", given=request.url.path[:200]))


def routes(context: Context) -> list[BaseRoute]:
    """Return the routes of everything but the WebSocket; put `guard` around the application."""
    anybody = Endpoint(context, roles=(), get=nothing_here, post=nothing_here)
    operator: Roles = ("operator",)
    people: Roles = ("operator", "node")  # who owns a machine of the cluster may use it
    own_job: Roles = ("operator", "job")
    everyone: Roles = ("operator", "node", "job")
    node: Role = "node"

    def at(path: str, roles: Roles, *reads: Role, **handlers: Handler) -> Route:
        return Route(path, Endpoint(context, roles=roles, read_roles=reads, **handlers))

    def open_at(path: str, **handlers: Handler) -> Route:
        return at(path, (), **handlers)

    job = "/api/jobs/{job}"
    return [
        open_at("/", get=pages.page),
        open_at("/login", post=pages.login),
        open_at("/logout", post=pages.logout),
        open_at("/static/{name}", get=pages.static),
        open_at("/healthz", get=rest_hub.health),
        open_at("/api/join", post=rest_hub.join),
        at("/metrics", operator, node, get=rest_metrics.show),
        at("/api/hub", everyone, get=rest_hub.show_hub),
        at("/api/events", operator, node, get=rest_hub.show_events),
        at("/api/nodes", operator, node, get=rest_hub.show_nodes),
        at("/api/nodes/{node}/drain", people, post=rest_hub.drain),
        at("/api/tickets", operator, post=rest_hub.make_ticket),
        at("/api/speed", everyone, get=rest_files.send_bytes, post=rest_files.take_bytes),
        at("/api/stream", operator, get=Streams().answer),
        at("/api/history", operator, get=rest_history.read),
        at("/api/jobs", people, get=rest_jobs.list_jobs, post=rest_jobs.submit),
        at(job, own_job, node, get=rest_jobs.show_job),
        at(f"{job}/metrics", own_job, node, get=rest_jobs.read_metrics),
        at(f"{job}/events", own_job, node, get=rest_jobs.read_events),
        at(f"{job}/rounds", own_job, node, get=rest_jobs.read_rounds),
        at(f"{job}/logs", own_job, node, get=rest_jobs.read_logs),
        at(f"{job}/stop", people, post=rest_jobs.stop),
        at(f"{job}/resume", people, post=rest_jobs.resume),
        at(f"{job}/files", own_job, node, get=rest_files.list_files),
        at(f"{job}/files/{{path:path}}", own_job, node, get=rest_files.get_file,
           put=rest_files.put_file),
        at("/api/blobs/{sha256}", everyone, get=rest_blobs.get_blob, put=rest_blobs.put_blob),
        at("/api/queues", operator, node, get=rest_queues.show_queues),
        at("/api/queues/dead", everyone, get=rest_queues.show_dead),
        at("/api/queues/put", everyone, post=rest_queues.put),
        at("/api/queues/claim", everyone, post=rest_queues.claim),
        at("/api/queues/ack", everyone, post=rest_queues.ack),
        at("/api/queues/extend", everyone, post=rest_queues.extend),
        at("/api/queues/release", everyone, post=rest_queues.release),
        Route("/{path:path}", anybody),
    ]  # fmt: skip
