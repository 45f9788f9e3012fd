"""The dashboard's files: page, modules and style sheets, all from the hub and compressed.

Addresses are relative, for hubs below a path prefix.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import html
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from atoll.errors import AuthError, HubError
from atoll.hub.http.access import access_of
from atoll.hub.http.context import Context
from atoll.hub.http.endpoint import HttpRefused, audit_as
from atoll.hub.http.middleware import cookie_name, source_of, token_of
from atoll.hub.security.auth import PEOPLE
from atoll.hub.security.browser_logins import KEPT_S

FOLDER = Path(__file__).parent / "static"

_TYPES = {".js": "text/javascript", ".css": "text/css"}

_SECURITY = {
    "content-security-policy": (
        "default-src 'self'; script-src 'self'; object-src 'none'; img-src 'self' data: blob:; "
        "style-src 'self' 'unsafe-inline'; "  # widths of bars and colours of series
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


async def page(request: Request, context: Context) -> Response:
    """GET /: the dashboard, or the login form; `?token=` and `?ticket=` log in."""
    has_secret = "ticket" in request.query_params or "token" in request.query_params
    if has_secret and request.headers.get("sec-fetch-site") == "cross-site":
        # A page elsewhere could log its reader in as another person.
        return _login_form("a link on another site leads here: open it by copying its address")
    if secret := request.query_params.get("ticket"):
        return await _log_in_once(request, context, secret)
    token, from_cookie = token_of(request.scope, request.headers)
    if not token:
        return _login_form()
    if not from_cookie:
        return await _log_in(request, context, token)
    try:
        context.stores.auth.authenticate_browser(token, source=source_of(request.scope))
    except AuthError:  # e.g. a cookie of a previous hub on this port
        return _login_form()
    text = _text("index.html").replace("<!--modules-->", _preloads())
    return HTMLResponse(text, headers=_SECURITY)


async def login(request: Request, context: Context) -> Response:
    """POST /login: exchange the form's token for a cookie."""
    form = parse_qs((await request.body())[:4096].decode("utf-8", "replace"))
    return await _log_in(request, context, form.get("token", [""])[0].strip())


async def logout(request: Request, context: Context) -> Response:
    """POST /logout: end the login of this browser."""
    secret, from_cookie = token_of(request.scope, request.headers)
    if from_cookie:
        await context.stores.auth.browsers.end(secret)
    response = RedirectResponse("./", status_code=303)
    response.delete_cookie(cookie_name(request.headers))
    return response


async def _log_in_once(request: Request, context: Context, secret: str) -> Response:
    """Exchange a ticket for a login; used where others could read the address."""
    try:
        admitted = await access_of(context).log_in(
            secret, name="browser", source=source_of(request.scope)
        )
    except AuthError as error:
        return _login_form(error.what)
    return await _log_in(request, context, admitted.token)


async def _log_in(request: Request, context: Context, token: str) -> Response:
    """Set the cookie and redirect, so that the token leaves the address bar."""
    try:
        identity = context.stores.auth.authenticate(token, source=source_of(request.scope))
    except AuthError as error:
        return _login_form(error.what)
    if identity.role not in PEOPLE:
        return _login_form(f"this is the token of {identity.role} {identity.name}")
    audit_as(request, identity.role, identity.name)
    response = RedirectResponse("./", status_code=303)
    response.set_cookie(
        cookie_name(request.headers),
        await context.stores.auth.browsers.begin(identity.role, identity.name),
        max_age=int(KEPT_S),
        httponly=True,
        secure=request.url.scheme == "https",
        # Not strict, so that links from other sites work; the Origin of requests that change
        # something is checked.
        samesite="lax",
    )
    return response


def _login_form(problem: str = "") -> Response:
    alert = f'<p class="note" role="alert">Refused: {html.escape(problem)}.</p>' if problem else ""
    text = _text("login.html").replace("<!--problem-->", alert)
    return HTMLResponse(text, status_code=401 if problem else 200, headers=_SECURITY)


async def static(request: Request, _context: Context) -> Response:
    """GET /static/ROOM/NAME: modules and style sheets."""
    name = request.path_params["name"]
    file = _served_files().get(name)
    if file is None:
        raise HttpRefused(404, HubError("there is no such file", given=repr(name[:100])))
    headers = {
        "cache-control": "no-cache",
        "etag": file.etag,
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
    }
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(file.content, media_type=file.media_type, headers=headers)
    headers["content-encoding"] = "gzip"
    return Response(file.compressed, media_type=file.media_type, headers=headers)


@dataclass(frozen=True, slots=True)
class _Served:
    """A file as it is sent."""

    content: bytes
    compressed: bytes
    media_type: str
    etag: str


@functools.cache
def _served_files() -> Mapping[str, _Served]:
    """Return every module and style sheet by path, about 400 kB; other names are a 404."""
    served = {}
    for path in FOLDER.rglob("*"):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            served[path.relative_to(FOLDER).as_posix()] = _Served(
                content, gzip.compress(content, 9, mtime=0), _TYPES[path.suffix], etag
            )
    return served


def _preloads() -> str:
    """Return links with which a browser fetches all modules in parallel."""
    names = sorted(name for name in _served_files() if name.endswith(".js"))
    return "\n".join(f'<link rel="modulepreload" href="static/{name}">' for name in names)


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
