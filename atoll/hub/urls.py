"""Table of all HTTP routes of the hub."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from atoll.errors import HubError
from atoll.hub.alarms import rest as rest_alarms
from atoll.hub.dashboard import pages
from atoll.hub.dashboard.sse import EventStreams
from atoll.hub.http import (
    access,
    files,
    hub,
    jobs,
    keys,
    limits,
    pairing,
    plans,
    prometheus,
    queues,
    secrets,
    verification,
)
from atoll.hub.http.context import Context, LiveHub
from atoll.hub.http.endpoint import Endpoint, Handler, HttpRefused
from atoll.hub.http.middleware import add_authentication
from atoll.hub.security.auth import Role

Roles = tuple[Role, ...]

__all__ = ["Context", "LiveHub", "add_authentication", "routes"]


async def nothing_here(request: Request, _context: Context) -> Response:
    """Return 404 for every other path."""
    raise HttpRefused(404, HubError("unknown address", given=request.url.path[:200]))


def routes(context: Context) -> list[BaseRoute]:
    """Return every route except the WebSocket; authentication is added by `add_authentication`."""
    anybody = Endpoint(context, {"get": nothing_here, "post": nothing_here}, roles=())
    operator: Roles = ("operator",)
    own_job: Roles = ("operator", "job")
    everyone: Roles = ("operator", "node", "job")
    queued: Roles = (*everyone, "program")
    own_queue: Roles = (*own_job, "program")
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
        open_at("/static/{name:path}", get=pages.static),
        open_at("/healthz", get=hub.health),
        open_at("/ca.pem", get=access.show_ca),
        open_at("/api/join", post=access.join),
        open_at("/api/login", post=access.log_in),
        open_at("/api/pair", post=pairing.start),
        open_at("/api/pair/finish", post=pairing.finish),
        at("/api/pairing", operator, audited=False, get=pairing.show, post=pairing.renew),
        at("/api/logout", operator, writes=("viewer", "program"), post=access.log_out),
        at("/api/renew", ("node",), post=access.renew),
        at("/api/tickets", operator, get=access.list_tickets, post=access.make_ticket),
        at("/api/tickets/{ticket}/revoke", operator, post=access.revoke_ticket),
        at("/api/keys", operator, get=keys.show),
        at("/api/keys/rotate", operator, post=keys.rotate),
        at("/api/secrets", operator, get=secrets.show),
        at("/api/secrets/{name}", operator, put=secrets.store, delete=secrets.remove),
        at("/api/limits", operator, viewer, get=limits.show),
        at("/api/audit", operator, get=access.show_audit),
        at("/metrics", operator, viewer, get=prometheus.show),
        at("/api/hub", everyone, viewer, get=hub.show_hub),
        at("/api/events", operator, viewer, get=hub.show_events),
        at("/api/nodes", operator, viewer, get=hub.show_nodes),
        at("/api/nodes/{node}/drain", operator, post=hub.drain),
        at("/api/nodes/{node}/revoke", operator, post=access.revoke_node),
        at("/api/speed", everyone, viewer, audited=False, get=files.send_bytes,
           post=files.take_bytes),
        at("/api/stream", operator, viewer, get=EventStreams().answer),
        at("/api/history", operator, viewer, get=hub.show_history),
        at("/api/jobs", operator, viewer, get=jobs.list_jobs, post=jobs.submit),
        at(job, operator, "job", viewer, get=jobs.show_job, delete=jobs.delete_job),
        at(f"{job}/secrets", ("job",), get=secrets.give),
        at(f"{job}/size", operator, viewer, get=jobs.show_size),
        at(f"{job}/metrics", own_job, viewer, get=jobs.read_metrics),
        at(f"{job}/events", own_job, viewer, get=jobs.read_events),
        at(f"{job}/rounds", own_job, viewer, get=jobs.read_rounds),
        at(f"{job}/worth", own_job, viewer, get=rest_alarms.show_node_value),
        at(f"{job}/logs", own_job, viewer, get=jobs.read_logs),
        # What the page shows; nothing changes, but a process works for some seconds.
        at("/api/plan", operator, audited=False, post=plans.of_text),
        at(f"{job}/plan", operator, viewer, get=plans.of_job),
        at(f"{job}/stop", operator, post=jobs.stop),
        at(f"{job}/resume", operator, post=jobs.resume),
        at(f"{job}/nodes", operator, post=jobs.scale),
        at(f"{job}/files", own_job, viewer, get=files.list_files),
        # A node uploads what a job left on it; the handler checks which files it may write.
        at(f"{job}/files/{{path:path}}", own_job, viewer, writes=("node",), audited=False,
           get=files.get_file, put=files.put_file),
        at(f"{job}/verification", operator, viewer, get=verification.show),
        at(f"{job}/verification/{{challenge}}/{{position}}", ("job",), audited=False,
           get=verification.give_state, put=verification.take_state),
        at(f"{job}/rendezvous/{{member}}", ("job",), audited=False, get=hub.find_rendezvous,
           put=hub.publish_rendezvous),
        at("/api/blobs/{sha256}", queued, audited=False, get=files.get_blob,
           put=files.put_blob),
        at("/api/alarms", operator, viewer, get=rest_alarms.show),
        at("/api/alarms/{alarm}/silence", operator, post=rest_alarms.silence),
        at("/api/queues", operator, viewer, get=queues.show_queues),
        at("/api/queues/dead", queued, viewer, get=queues.show_dead),
        at("/api/queues/requeue", operator, post=queues.requeue),
        at("/api/queues/discard", operator, post=queues.discard),
        at("/api/queues/open", own_queue, audited=False, post=queues.declare),
        at("/api/queues/put", queued, audited=False, post=queues.put),
        at("/api/queues/put_many", queued, audited=False, post=queues.put_many),
        at("/api/queues/ack_many", queued, audited=False, post=queues.ack_many),
        at("/api/topics/publish", own_queue, audited=False, post=queues.publish),
        at("/api/topics/read", own_queue, audited=False, post=queues.read),
        at("/api/topics/ack", own_queue, audited=False, post=queues.acknowledge),
        at("/api/queues/claim", queued, audited=False, post=queues.claim),
        at("/api/queues/ack", queued, audited=False, post=queues.ack),
        at("/api/queues/extend", queued, audited=False, post=queues.extend),
        at("/api/queues/release", queued, audited=False, post=queues.release),
        Route("/{path:path}", anybody),
    ]  # fmt: skip
