"""REST handlers of joins, logins, tickets, certificates, revocation and the audit log."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from atoll.errors import ConfigError, HubError
from atoll.hub.http.audit_sentences import audit_sentence
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, Json, audit_as, body_as, identity_of, number
from atoll.hub.http.middleware import source_of
from atoll.hub.nodes.access import Access
from atoll.hub.quotas.limits import checked
from atoll.hub.security.scopes import checked_scopes
from atoll.wire.messages import NodeInfo

MAX_NOTE = 100
MAX_VALID_S = 366 * 86_400.0


class JoinRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/join."""

    secret: str
    """Last part of the ticket."""
    name: str
    info: NodeInfo | None = None
    request: str = ""
    """PEM signing request for the node's key; required if the hub terminates TLS itself."""


async def join(request: Request, context: Context) -> Response:
    """POST /api/join: exchange a ticket for a node's token and certificate."""
    body = await body_as(request, JoinRequest)
    source = source_of(request.scope)
    admitted = await access_of(context).join(
        body.secret, name=body.name, request=body.request, source=source, scope=request.scope
    )
    audit_as(request, "node", admitted.name)
    host = body.info.hostname if body.info else source
    await context.stores.events.add("", "node-joined", f"{admitted.name} joined from {host}")
    answer = {"node": admitted.name, "token": admitted.token, "certificate": admitted.certificate}
    return Json(answer, status_code=201)


class LoginRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/login."""

    secret: str
    name: str
    """Requested name of the login, for the audit log."""


async def log_in(request: Request, context: Context) -> Response:
    """POST /api/login: exchange a ticket for the token of an operator, viewer or program."""
    body = await body_as(request, LoginRequest)
    source = source_of(request.scope)
    admitted = await access_of(context).log_in(body.secret, name=body.name, source=source)
    audit_as(request, admitted.role, admitted.name)
    answer = {"name": admitted.name, "role": admitted.role, "token": admitted.token}
    return Json(answer, status_code=201)


async def log_out(request: Request, context: Context) -> Response:
    """POST /api/logout: end the login of this request's token."""
    ended = await access_of(context).log_out(identity_of(request))
    return Json({"ended": ended})


class RenewRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/renew."""

    request: str


async def renew(request: Request, context: Context) -> Response:
    """POST /api/renew: a new certificate for a node, before the present one expires."""
    body = await body_as(request, RenewRequest)
    node = identity_of(request).name
    certificates = access_of(context).certificates
    if not certificates.needed:
        raise HttpRefused(
            409, HubError("this hub signs no certificates: it does not use TLS itself")
        )
    if not body.request:
        raise ConfigError("a signing request is missing", given="an empty text")
    return Json({"certificate": await certificates.issue(body.request, node=node)})


async def show_ca(request: Request, context: Context) -> Response:
    """GET /ca.pem: certificate of the hub's authority, to compare with a fingerprint.

    `?fingerprint=` selects one of them, e.g. the one that is to replace the present one.
    """
    tls = access_of(context).tls
    authorities = tls.authorities if tls is not None else []
    wanted = request.query_params.get("fingerprint")
    for authority in authorities:
        if wanted in (None, authority.fingerprint):
            text = authority.ca.read_text(encoding="utf-8")
            return PlainTextResponse(text, media_type="application/x-pem-file")
    raise HttpRefused(404, HubError("this hub has no such certificate authority of its own"))


class TicketRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/tickets."""

    role: Literal["node", "viewer", "operator", "program"] = "node"
    uses: int | None = None
    """Maximum number of uses; None: no limit."""
    valid_s: float | None = None
    """Validity in seconds; None: no expiry."""
    name: str = ""
    quotas: dict[str, int] = {}
    """Quotas of the nodes or logins that are created with it, by name."""
    queues: list[str] = []
    """Names below which a program may use queues and topics; empty: all that are shared."""


async def make_ticket(request: Request, context: Context) -> Response:
    """POST /api/tickets: create a ticket."""
    body = await body_as(request, TicketRequest)
    if body.uses is not None and not 0 < body.uses <= 1_000_000:
        raise ConfigError("a ticket needs uses", given=body.uses, expected="1 to 1,000,000")
    if body.valid_s is not None and not 0 < body.valid_s <= MAX_VALID_S:
        expected = f"more than 0 and at most {MAX_VALID_S:.0f} s"
        raise ConfigError("a ticket is valid for some time", given=body.valid_s, expected=expected)
    secret = await context.stores.auth.create_ticket(
        role=body.role, uses=body.uses, valid_s=body.valid_s, note=body.name[:MAX_NOTE],
        made_by=identity_of(request).name, quotas=checked(body.quotas, of_token=True),
        queues=checked_scopes(body.queues, role=body.role),
    )  # fmt: skip
    return Json({"ticket": ticket_with(context, secret)}, status_code=201)


async def list_tickets(_request: Request, context: Context) -> Response:
    """GET /api/tickets: every ticket, without its secret."""
    return Json(await context.stores.auth.list_tickets())


async def revoke_ticket(request: Request, context: Context) -> Response:
    """POST /api/tickets/ID/revoke: revoke a ticket and the logins created with it."""
    id = str(request.path_params["ticket"])
    return Json({"ticket": id, "logged_out": await access_of(context).revoke_ticket(id)})


async def revoke_node(request: Request, context: Context) -> Response:
    """POST /api/nodes/NODE/revoke: revoke a node's access at once."""
    node = str(request.path_params["node"])
    try:
        tickets = await access_of(context).shut_out(node)
    except ConfigError as error:
        raise HttpRefused(404, error) from error
    by = identity_of(request).name
    await context.stores.events.add("", "node-revoked", f"access of {node} was revoked by {by}")
    return Json({"node": node, "open_tickets": tickets})


async def show_audit(request: Request, context: Context) -> Response:
    """GET /api/audit?after=ID&limit=N&name=NAME: the audit log, oldest first."""
    after = int(number(request, "after", 0))
    limit = int(number(request, "limit", 1_000, low=1, high=10_000))
    name = request.query_params.get("name", "")
    rows = await context.audit.read(after=after, limit=limit, name=name) if context.audit else []
    return Json([row | {"text": audit_sentence(row)} for row in rows])


def ticket_with(context: Context, secret: str) -> str:
    """Return a whole ticket of this hub with a secret."""
    front, _, end = context.ticket.rpartition("/")
    mark = f"~{end.partition('~')[2]}" if "~" in end else ""
    return f"{front}/{secret}{mark}"


def access_of(context: Context) -> Access:
    """Return the hub's access control; HubError if there is none."""
    if context.access is None:
        raise HubError("this hub accepts no joins or logins")
    return context.access
