"""REST handlers of the hub's own keys: the authority, its certificate, the operator's token."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from atoll.errors import ConfigError, HubError
from atoll.hub.http.access import access_of
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import Json, body_as, identity_of
from atoll.hub.security.certificates import ends_of
from atoll.hub.security.tls import TlsFiles

MAX_OVERLAP_S = 90 * 86_400.0


class RotateRequest(msgspec.Struct, frozen=True):
    """Body of POST /api/keys/rotate."""

    what: Literal["authority", "certificate", "operator"]
    overlap_s: float = 0.0
    """Seconds for which the replaced key stays valid."""


async def show(_request: Request, context: Context) -> Response:
    """GET /api/keys: fingerprints and times (seconds since 1970), no secrets."""
    tls = access_of(context).tls
    if tls is None or not tls.named:
        return Json({"authorities": []})
    return Json(await asyncio.to_thread(_facts, tls))


def _facts(tls: TlsFiles) -> dict[str, Any]:
    authorities = [
        {"fingerprint": one.fingerprint, "ends": ends_of(one.ca)} for one in tls.authorities
    ]
    return {
        "authorities": authorities,
        "switch_at": tls.switch_at if tls.next is not None else None,
        "certificate_ends": ends_of(tls.authority.certificate),
    }


async def rotate(request: Request, context: Context) -> Response:
    """POST /api/keys/rotate: replace a key; what is replaced stays valid for a while."""
    body = await body_as(request, RotateRequest)
    if not 0 <= body.overlap_s <= MAX_OVERLAP_S:
        raise ConfigError(
            "the overlap is out of range",
            given=f"{body.overlap_s:.0f} s",
            expected=f"0 to {MAX_OVERLAP_S / 86_400:.0f} days",
        )
    by, tls = identity_of(request).name, access_of(context).tls
    answer: dict[str, Any] = {"what": body.what, "by": by}
    if body.what == "operator":
        token = await context.stores.auth.rotate_operator(overlap_s=body.overlap_s)
        answer |= {"token": token}
    elif tls is None:
        raise HubError("this hub has no certificates: it does not use TLS itself")
    elif body.what == "authority":
        at = await asyncio.to_thread(tls.rotate_authority, overlap_s=body.overlap_s)
        answer |= {"switch_at": at}
    else:
        answer |= {"ends": await asyncio.to_thread(tls.renew_certificate)}
    await context.stores.events.add("", "keys-rotated", f"{by} has rotated: {body.what}")
    return Json(answer)
