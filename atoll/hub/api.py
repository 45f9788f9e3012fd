"""Every address that the hub answers over HTTP, in one table."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from atoll.errors import HubError
from atoll.hub import (
    pages,
    rest_access,
    rest_blobs,
    rest_deleting,
    rest_files,
    rest_gates,
    rest_history,
    rest_hub,
    rest_jobs,
    rest_metrics,
    rest_queues,
)
from atoll.hub.alarms import rest as rest_alarms
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
    anybody = Endpoint(context, {"get": nothing_here, "post": nothing_here}, roles=())
    operator: Roles = ("operator",)
    own_job: Roles = ("operator", "job")
    everyone: Roles = ("operator", "node", "job")
    viewer: Role = "viewer"

    def at(
        path: str,
        roles: Roles,
        *reads: Role,
        writes: Roles = (),
        audited: bool = True,
        **handlers: Handler,
    ) -> Route:
        """Return a route for `roles`; `reads` may GET besides, `writes` do the rest besides."""
        return Route(
            path,
            Endpoint(
                context,
                handlers,
                roles=roles,
                read_roles=reads,
                write_roles=writes,
                audited=audited,
            ),
        )

    def open_at(path: str, **handlers: Handler) -> Route:
        return Route(path, Endpoint(context, handlers, roles=()))

    job = "/api/jobs/{job}"
    return [
        open_at("/", get=pages.page),
        open_at("/login", post=pages.login),
        open_at("/logout", post=pages.logout),
        open_at("/static/{name}", get=pages.static),
        open_at("/healthz", get=rest_hub.health),
        open_at("/ca.pem", get=rest_access.show_ca),
        open_at("/api/join", post=rest_access.join),
        open_at("/api/login", post=rest_access.log_in),
        at("/api/logout", operator, writes=("viewer",), post=rest_access.log_out),
        at("/api/renew", ("node",), post=rest_access.renew),
        at("/api/tickets", operator, get=rest_access.list_tickets, post=rest_access.make_ticket),
        at("/api/tickets/{ticket}/revoke", operator, post=rest_access.revoke_ticket),
        at("/api/audit", operator, get=rest_access.show_audit),
        at("/metrics", operator, viewer, get=rest_metrics.show),
        at("/api/hub", everyone, viewer, get=rest_hub.show_hub),
        at("/api/events", operator, viewer, get=rest_hub.show_events),
        at("/api/nodes", operator, viewer, get=rest_hub.show_nodes),
        at("/api/nodes/{node}/drain", operator, post=rest_hub.drain),
        at("/api/nodes/{node}/revoke", operator, post=rest_access.revoke_node),
        at("/api/speed", everyone, viewer, audited=False, get=rest_files.send_bytes,
           post=rest_files.take_bytes),
        at("/api/stream", operator, viewer, get=Streams().answer),
        at("/api/history", operator, viewer, get=rest_history.read),
        at("/api/jobs", operator, viewer, get=rest_jobs.list_jobs, post=rest_jobs.submit),
        at(job, operator, "job", viewer, get=rest_jobs.show_job, delete=rest_deleting.delete_job),
        at(f"{job}/size", operator, viewer, get=rest_deleting.show_size),
        at(f"{job}/metrics", own_job, viewer, get=rest_jobs.read_metrics),
        at(f"{job}/events", own_job, viewer, get=rest_jobs.read_events),
        at(f"{job}/rounds", own_job, viewer, get=rest_jobs.read_rounds),
        at(f"{job}/worth", own_job, viewer, get=rest_alarms.show_worth),
        at(f"{job}/logs", own_job, viewer, get=rest_jobs.read_logs),
        at(f"{job}/stop", operator, post=rest_jobs.stop),
        at(f"{job}/resume", operator, post=rest_jobs.resume),
        at(f"{job}/nodes", operator, post=rest_jobs.scale),
        at(f"{job}/files", own_job, viewer, get=rest_files.list_files),
        # A node brings back what a job left on it; the handler looks which files those may be.
        at(f"{job}/files/{{path:path}}", own_job, viewer, writes=("node",), audited=False,
           get=rest_files.get_file, put=rest_files.put_file),
        at(f"{job}/gates/{{member}}", ("job",), audited=False, get=rest_gates.show_gate,
           put=rest_gates.open_gate),
        at("/api/blobs/{sha256}", everyone, audited=False, get=rest_blobs.get_blob,
           put=rest_blobs.put_blob),
        at("/api/alarms", operator, viewer, get=rest_alarms.show),
        at("/api/alarms/{alarm}/silence", operator, post=rest_alarms.silence),
        at("/api/queues", operator, viewer, get=rest_queues.show_queues),
        at("/api/queues/dead", everyone, viewer, get=rest_queues.show_dead),
        at("/api/queues/requeue", operator, post=rest_queues.requeue),
        at("/api/queues/discard", operator, post=rest_queues.discard),
        at("/api/queues/open", own_job, audited=False, post=rest_queues.declare),
        at("/api/queues/put", everyone, audited=False, post=rest_queues.put),
        at("/api/queues/put_many", everyone, audited=False, post=rest_queues.put_many),
        at("/api/queues/ack_many", everyone, audited=False, post=rest_queues.ack_many),
        at("/api/topics/publish", own_job, audited=False, post=rest_queues.publish),
        at("/api/topics/read", own_job, audited=False, post=rest_queues.read),
        at("/api/topics/ack", own_job, audited=False, post=rest_queues.acknowledge),
        at("/api/queues/claim", everyone, audited=False, post=rest_queues.claim),
        at("/api/queues/ack", everyone, audited=False, post=rest_queues.ack),
        at("/api/queues/extend", everyone, audited=False, post=rest_queues.extend),
        at("/api/queues/release", everyone, audited=False, post=rest_queues.release),
        Route("/{path:path}", anybody),
    ]  # fmt: skip
