"""Stands before everything: whose request is it, and how much may it send?

A token comes in `Authorization: Bearer`, in the dashboard's cookie or as `?token=`. What changes
something on the strength of a cookie must come from the hub's own pages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.errors import AuthError, FrameTooLarge
from atoll.hub.context import Context
from atoll.hub.endpoint import error_response
from atoll.hub.files import MAX_FILE_BYTES

_HOST_PORT = re.compile(r".*:(\d{1,5})")

MAX_BODY_BYTES = 24 * 2**20
"""Largest body of a request that is not a file: a job with its files, a queue item in base64."""

MAX_SPEED_BYTES = 256 * 2**20
"""Largest body of a speed test."""

_OPEN = re.compile(r"/(?:|healthz|login|logout|favicon\.ico|api/join|static/[^/]*)")
_FILE = re.compile(r"/api/jobs/[^/]+/files/.+")


class ForeignPage(AuthError):
    """A page of another site tried to act with the dashboard's login."""


def guard(app: ASGIApp, context: Context) -> ASGIApp:
    """Return `app` behind authentication and limits; only HTTP is touched."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        limit = _body_limit(scope["path"])
        limited = context.stores.auth.is_limited(source_of(scope))
        try:
            scope.setdefault("state", {})["identity"] = _identify(scope, headers, context)
        except ForeignPage as error:
            await error_response(error, 403)(scope, receive, send)
            return
        except AuthError as error:
            await error_response(error, 429 if limited else 401)(scope, receive, send)
            return
        declared = headers.get("content-length", "0")
        if not declared.isascii() or not declared.isdigit() or int(declared) > limit:
            await error_response(_too_large(declared, limit))(scope, receive, send)
            return
        await app(scope, _bounded(receive, limit), send)

    return guarded


def source_of(scope: Scope) -> str:
    """Return the address that a request comes from."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def cookie_name(headers: Mapping[str, str]) -> str:
    """Return the name of the dashboard's cookie; hubs on two ports of a host do not share one."""
    found = _HOST_PORT.fullmatch(headers.get("host", ""))
    return f"atoll_{found[1]}" if found else "atoll"


def token_of(scope: Scope, headers: Mapping[str, str]) -> tuple[str, bool]:
    """Return the token of a request, and whether a cookie brought it."""
    kind, _, bearer = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and bearer:
        return bearer.strip(), False
    query = parse_qs(scope["query_string"].decode("latin-1"))
    if query.get("token"):
        return query["token"][0], False
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers))
    except CookieError:
        morsel = None
    return (morsel.value, True) if morsel else ("", False)


def _identify(scope: Scope, headers: Headers, context: Context) -> Any:
    """Return the identity behind a request; None where none is needed.

    Raises:
        AuthError: a token is needed, and this one is missing or wrong.
    """
    if _OPEN.fullmatch(scope["path"]):
        return None
    token, from_cookie = token_of(scope, headers)
    identity = context.stores.auth.authenticate(token, source=source_of(scope))
    if from_cookie and scope["method"] not in ("GET", "HEAD"):
        origin = headers.get("origin", "")
        if origin.partition("://")[2] != headers.get("host"):
            raise ForeignPage(
                "a page of another site tried to use this login",
                given=origin or "no Origin header",
                expected="the dashboard of this hub",
            )
    return identity


def _body_limit(path: str) -> int:
    if _FILE.fullmatch(path):
        return MAX_FILE_BYTES
    return MAX_SPEED_BYTES if path == "/api/speed" else MAX_BODY_BYTES


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return `receive` that stops a body without a declared length at the limit."""
    total = 0

    async def bounded() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > limit:
            raise _too_large("more", limit)
        return message

    return bounded


def _too_large(given: str, limit: int) -> FrameTooLarge:
    return FrameTooLarge(
        "the body of the request is too large",
        given=f"{given[:20]} bytes",
        expected=f"at most {limit} bytes",
        remedy="put large things as files of a job",
    )
