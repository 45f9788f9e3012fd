"""REST handlers of pairing by a short code."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import ConfigError, WrongCode
from atoll.hub.http.access import ticket_with
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import Json, body_as
from atoll.hub.http.middleware import source_of
from atoll.hub.security.pairing import Pairing
from atoll.wire.pairing import PairProof, PairStart, PairTicket, seal

TICKET_S = 300.0
"""Validity of the ticket that a pairing hands over; it is used at once."""


async def show(_request: Request, context: Context) -> Response:
    """GET /api/pairing: the code, for operators; a used or expired one is replaced."""
    return Json(msgspec.to_builtins(_pairing(context).show()))


async def renew(_request: Request, context: Context) -> Response:
    """POST /api/pairing: a new code with all its tries; the old one ends."""
    return Json(msgspec.to_builtins(_pairing(context).show(renew=True)), status_code=201)


async def start(request: Request, context: Context) -> Response:
    """POST /api/pair: the first step of a machine that joins."""
    body = await body_as(request, PairStart)
    return Json(await _pairing(context).start(body.share))


async def finish(request: Request, context: Context) -> Response:
    """POST /api/pair/finish: check the proof; the answer has a ticket for one machine."""
    body = await body_as(request, PairProof)
    pairing, source = _pairing(context), source_of(request.scope)
    try:
        keys = pairing.finish(body.exchange, body.proof)
    except WrongCode as error:
        text = f"a wrong pairing code came from {source}: {error.given}"
        await context.stores.events.add("", "pairing-refused", text)
        raise
    secret = await context.stores.auth.create_ticket(
        uses=1, valid_s=TICKET_S, note=f"pairing of {source}", made_by="hub"
    )
    return Json(PairTicket(keys.mac_b, seal(ticket_with(context, secret), keys)), status_code=201)


def _pairing(context: Context) -> Pairing:
    """Return the hub's pairing; ConfigError without TLS, where the join would show the ticket."""
    if context.pairing is None or "~" not in context.ticket:
        raise ConfigError(
            "this hub has no pairing codes",
            given="a hub without TLS",
            remedy="join with a ticket: `atoll ticket` on the hub's machine prints one",
        )
    return context.pairing
