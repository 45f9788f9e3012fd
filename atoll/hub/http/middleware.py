"""Authentication, body limits and browser protection in front of all HTTP routes.

A token comes in `Authorization: Bearer` or in the dashboard's cookie; `?token=` only logs in at
`/`. Requests authenticated by cookie must come from the hub's own pages.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.errors import AtollError, AuthError, FrameTooLarge, HubError, LimitReached
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, error_response
from atoll.hub.security.auth import Identity
from atoll.hub.security.connection_limits import RateLimit, is_loopback
from atoll.hub.security.forwarded import source_of as source_of
from atoll.hub.sessions.request_meter import HTTP_COST, ITEM_BYTES_PER_FRAME
from atoll.hub.storage.blobs import MAX_BLOB_BYTES
from atoll.hub.storage.files import MAX_FILE_BYTES

_HOST_PORT = re.compile(r".*:(\d{1,5})")

MAX_BODY_BYTES = 24 * 2**20
"""Largest body other than files: a job with its files, a queue item in base64."""

MAX_SPEED_BYTES = 256 * 2**20

MAX_OPEN_BODY_BYTES = 64 * 2**10
"""Largest body of a request without a token; a join with its signing request has 2 kB."""

_OPEN = re.compile(
    r"/(?:|healthz|login|logout|favicon\.ico|ca\.pem|api/(?:join|login|pair|pair/finish)|static/.*)"
)
_ENTERING = frozenset(("/login", "/api/join", "/api/login", "/api/pair", "/api/pair/finish"))
_FILE = re.compile(r"/api/jobs/[^/]+/files/.+")
_BLOB = re.compile(r"/api/blobs/[0-9a-f]{64}")

AUTHORITIES = "atoll-authorities"
"""Header with the fingerprints of the certificate authorities of this hub, present and next."""

_HEADERS = {
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class CrossOrigin(AuthError):
    """A page of another site tried to use the dashboard's login."""


class _AuthMiddleware:
    def __init__(self, app: ASGIApp, context: Context) -> None:
        self._app = app
        self._context = context
        self._limits = context.limits
        most = context.limits.joins_per_minute
        self._entering = RateLimit(context.clock, most=most, window_s=60.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate and limit an HTTP request; pass on other protocols."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        send = _with_headers(send, self._context)
        try:
            limit = self._check(scope, headers)
        except HttpRefused as refused:
            await self._pace(scope, headers)
            if refused.status != 413 and not isinstance(refused.error, LimitReached):
                await self._note(scope, refused.status)
            await error_response(refused.error, refused.status)(scope, receive, send)
            return
        await self._pace(scope, headers)
        deadline = None
        if _OPEN.fullmatch(scope["path"]):
            deadline = asyncio.get_running_loop().time() + self._limits.open_body_s
        await self._app(scope, _bounded(receive, limit, deadline=deadline), send)

    async def _pace(self, scope: Scope, headers: Headers) -> None:
        """Delay a client that sends too many requests, with or without a token."""
        if self._context.access is None or scope["path"] == "/healthz":
            return
        meters = self._context.access.meters
        identity: Identity | None = scope.get("state", {}).get("identity")
        if identity is None:
            pause_s = meters.stranger_pause_s(source_of(scope))
        else:
            stored = scope["path"].startswith("/api/queues/") and headers.get("content-length")
            nbytes = int(stored) if stored and stored.isdigit() else 0
            pause_s = meters.pause_s(identity, HTTP_COST + nbytes // ITEM_BYTES_PER_FRAME)
        if pause_s:
            await asyncio.sleep(pause_s)

    def _check(self, scope: Scope, headers: Headers) -> int:
        """Store the identity in the scope; return the body limit. Raises HttpRefused."""
        source = source_of(scope)
        limited = self._context.stores.auth.is_limited(source)
        try:
            self._check_rate(scope["path"], source)
            identity = _identify(scope, headers, self._context)
            scope.setdefault("state", {})["identity"] = identity
            if identity is not None and self._context.access is not None:
                self._context.access.admit(identity, scope)
        except CrossOrigin as error:
            raise HttpRefused(403, error) from error
        except LimitReached as error:
            raise HttpRefused(429, error) from error
        except AuthError as error:
            raise HttpRefused(429 if limited else 401, error) from error
        limit = _body_limit(scope["path"])
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared) > limit:
            raise HttpRefused(413, _too_large(declared, limit))
        return limit

    def _check_rate(self, path: str, source: str) -> None:
        """Refuse an address that joins or logs in too often, even with valid secrets."""
        if path not in _ENTERING or (self._limits.exempt_loopback and is_loopback(source)):
            return
        if self._entering.reached(source):
            error = AuthError(
                "too many joins and logins from this address",
                given=source,
                expected=f"at most {self._limits.joins_per_minute} a minute",
                remedy="wait a minute",
            )
            raise HttpRefused(429, error)
        self._entering.note(source)

    async def _note(self, scope: Scope, status: int) -> None:
        if self._context.audit is not None:
            await self._context.audit.note(
                None, address=source_of(scope), action="refused",
                target=f"{scope['method']} {scope['path']}", outcome=str(status), refused=True,
            )  # fmt: skip


def add_authentication(app: ASGIApp, context: Context) -> ASGIApp:
    """Wrap `app` in authentication and limits; only HTTP is affected."""
    return _AuthMiddleware(app, context)


def cookie_name(headers: Mapping[str, str]) -> str:
    """Return the cookie's name; it contains the port, as hubs on one host must not share it."""
    found = _HOST_PORT.fullmatch(headers.get("host", ""))
    return f"atoll_{found[1]}" if found else "atoll"


def token_of(scope: Scope, headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return the token of a request, or the secret of its cookie and True."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and bearer:
        return bearer.strip(), False
    if scope["path"] == "/":  # elsewhere tokens would appear in logs of proxies
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if query.get("token"):
            return query["token"][0], False
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers))
    except CookieError:
        morsel = None
    return (morsel.value, True) if morsel else ("", False)


def _identify(scope: Scope, headers: Headers, context: Context) -> Identity | None:
    """Return the identity, or None if none is needed; raises AuthError, CrossOrigin."""
    if _OPEN.fullmatch(scope["path"]):
        if scope["method"] == "POST" and says_foreign(headers):
            raise _foreign(headers)
        return None
    token, from_cookie = token_of(scope, headers)
    auth, source = context.stores.auth, source_of(scope)
    if not from_cookie:
        return auth.authenticate(token, source=source)
    identity = auth.authenticate_browser(token, source=source)
    _check_page(scope, headers)
    return identity


def _check_page(scope: Scope, headers: Headers) -> None:
    """Refuse cookie-authenticated requests caused by pages of other sites (CSRF)."""
    if says_foreign(headers):
        raise _foreign(headers)
    if scope["method"] in ("GET", "HEAD"):
        return
    if headers.get("origin", "null") == "null" and headers.get("sec-fetch-site") != "same-origin":
        raise _foreign(headers)
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    # A cross-site form cannot send this type without a CORS preflight.
    if kind != "application/json" and headers.get("content-length", "0") != "0":
        raise CrossOrigin(
            "a browser has to send JSON here", given=kind, expected="application/json"
        )


def says_foreign(headers: Mapping[str, str]) -> bool:
    """Return whether the headers identify a cross-site request."""
    origin = headers.get("origin")
    if origin is not None and origin != "null":
        return origin.partition("://")[2] != headers.get("host")
    # Browsers omit or null the origin of forms on pages with `no-referrer`.
    unknown = "same-origin" if origin is None else "cross-site"
    return headers.get("sec-fetch-site", unknown) not in ("same-origin", "none")


def _foreign(headers: Headers) -> CrossOrigin:
    return CrossOrigin(
        "a page of another site tried to use this login",
        given=headers.get("origin") or headers.get("sec-fetch-site") or "no Origin header",
        expected="the dashboard of this hub",
    )


def _body_limit(path: str) -> int:
    if _OPEN.fullmatch(path):
        return MAX_OPEN_BODY_BYTES
    if _FILE.fullmatch(path):
        return MAX_FILE_BYTES
    if _BLOB.fullmatch(path):
        return MAX_BLOB_BYTES
    return MAX_SPEED_BYTES if path == "/api/speed" else MAX_BODY_BYTES


def _bounded(receive: Receive, limit: int, *, deadline: float | None) -> Receive:
    """Return `receive` that enforces the size limit, and the deadline (loop time) of the body."""
    total, complete = 0, False

    async def bounded() -> Message:
        nonlocal total, complete
        try:
            async with asyncio.timeout_at(None if complete else deadline):
                message = await receive()
        except TimeoutError:
            raise HttpRefused(408, HubError("the request did not arrive in time")) from None
        total += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if total > limit:
            raise _too_large("more", limit)
        return message

    return bounded


def _with_headers(send: Send, context: Context) -> Send:
    tls = context.access.tls if context.access is not None else None

    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if tls is not None and tls.named:
                headers[AUTHORITIES] = tls.named
        await send(message)

    return sending


def _too_large(length: str, limit: int) -> AtollError:
    return FrameTooLarge(
        "the body of the request is too large",
        given=f"{length[:20]} bytes",
        expected=f"at most {limit} bytes",
        remedy="upload large data as files of a job",
    )
