"""One route of the REST interface: methods, accepted roles, and errors as JSON.

Every error is `{"error": {"kind", "what", "given", "expected", "remedy"}}`. Internal failures are
only logged: a client never sees a stack trace.
"""

from __future__ import annotations

import gzip
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from atoll.errors import (
    AtollError,
    AuthError,
    CheckpointMissing,
    ConfigError,
    FrameTooLarge,
    HubError,
    LimitReached,
    StorageFull,
    WireError,
    unknown,
)
from atoll.hub.http.context import Context
from atoll.hub.security.auth import Identity, Role
from atoll.hub.security.forwarded import source_of

T = TypeVar("T")

log = logging.getLogger(__name__)

Handler = Callable[[Request, Context], Awaitable[Response]]

_STATUS: list[tuple[type[AtollError], int]] = [
    (AuthError, 401),
    (StorageFull, 507),
    (FrameTooLarge, 413),
    (CheckpointMissing, 404),
    (ConfigError, 400),
    (WireError, 400),
    (LimitReached, 429),
    (HubError, 409),
]


class Json(Response):
    """A JSON response; NaN and infinity become null, bytes base64."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return msgspec.json.encode(content)


def compressed(request: Request, content: Any) -> Json:
    """Return a JSON response, compressed for a client that accepts it.

    Not for content that holds a secret beside text that others choose: the compressed length would
    reveal the secret.
    """
    answer = Json(content)
    if "gzip" in request.headers.get("accept-encoding", ""):
        answer.body = gzip.compress(answer.body, 1, mtime=0)
        answer.headers["content-length"] = str(len(answer.body))
        answer.headers["content-encoding"] = "gzip"
    answer.headers["vary"] = "accept-encoding"
    return answer


class HttpRefused(Exception):
    """Ends a request with this status and error."""

    def __init__(self, status: int, error: AtollError) -> None:
        super().__init__(str(error))
        self.status = status
        self.error = error


def error_response(error: AtollError, status: int = 0) -> Json:
    """Return the response for an error; status 0: by type of the error."""
    if not status:
        status = next((number for kind, number in _STATUS if isinstance(error, kind)), 500)
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return Json({"error": error.to_dict()}, status_code=status, headers=headers)


class Endpoint:
    """ASGI application of one route.

    Args:
        context: Passed to handlers.
        handlers: Method in lower case to handler; GET also serves HEAD.
        roles: Accepted roles (`job`: only if the path names its job). Empty: no token needed.
        read_roles: Roles also accepted for GET and HEAD.
        write_roles: Roles also accepted for other methods.
        audited: Write changes to the audit log; refusals always are.
    """

    def __init__(
        self,
        context: Context,
        handlers: Mapping[str, Handler],
        *,
        roles: Iterable[Role] = ("operator",),
        read_roles: Iterable[Role] = (),
        write_roles: Iterable[Role] = (),
        audited: bool = True,
    ) -> None:
        self._context = context
        self._audited = audited
        self._open = not frozenset(roles)
        self._roles = frozenset(roles) | frozenset(write_roles)
        self._read_roles = frozenset(roles) | frozenset(read_roles)
        self._handlers = {name.upper(): handler for name, handler in handlers.items()}
        if "GET" in self._handlers:
            self._handlers.setdefault("HEAD", self._handlers["GET"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        started = False

        async def watched(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, watched)
        except ClientDisconnect:
            log.debug("a client went away during %s %s", scope["method"], scope["path"])
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise  # the response has begun: the server must close the connection
            failure = HubError("the hub failed on this request", remedy="see the hub's log")
            await error_response(failure, 500)(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        handler = self._handlers.get(request.method)
        if handler is None:
            wrong = unknown("method for this address", request.method, self._handlers)
            refusal = error_response(wrong, 405)
            refusal.headers["allow"] = ", ".join(self._handlers)
            return refusal
        try:
            response = await self._attempt(handler, request)
        except ClientDisconnect:
            raise
        except Exception:
            await self._note(handler, request, 500)
            raise
        await self._note(handler, request, response.status_code)
        return response

    async def _attempt(self, handler: Handler, request: Request) -> Response:
        try:
            self._authorize(request)
            return await handler(request, self._context)
        except HttpRefused as refused:
            return error_response(refused.error, refused.status)
        except AtollError as error:
            return error_response(error)

    async def _note(self, handler: Handler, request: Request, status: int) -> None:
        audit, state = self._context.audit, request.scope.get("state", {})
        entered: Identity | None = state.get("entered")
        refused = status in (401, 403, 429)
        changes = request.method not in ("GET", "HEAD") and self._audited
        if audit is None or not (refused or changes or entered):
            return
        identity = entered or state.get("identity")
        await audit.note(
            identity if isinstance(identity, Identity) else None,
            address=source_of(request.scope),
            action=state.get("action") or getattr(handler, "__name__", "").replace("_", " "),
            target=f"{request.method} {request.scope['path']}{state.get('made', '')}",
            outcome=str(status),
            refused=refused,
        )

    def _authorize(self, request: Request) -> None:
        if self._open:
            return
        identity = identity_of(request)
        reading = request.method in ("GET", "HEAD")
        if identity.role not in (self._read_roles if reading else self._roles):
            raise forbidden(identity)
        job = request.path_params.get("job")
        if identity.role == "job" and job is not None and job != identity.name:
            raise forbidden(identity)


def audit_more(request: Request, *, action: str = "", made: str = "") -> None:
    """Record in the audit log what the request did, and the name of what it made."""
    request.scope["state"] |= {"action": action, "made": f"/{made}" if made else ""}


def identity_of(request: Request) -> Identity:
    """Return the authenticated identity of a request."""
    identity: Identity = request.scope["state"]["identity"]
    return identity


def audit_as(request: Request, role: str, name: str) -> None:
    """Record in the audit log that this identity was admitted by the request."""
    request.scope["state"]["entered"] = Identity(cast("Role", role), name)


def forbidden(identity: Identity) -> HttpRefused:
    """Return the refusal of a valid token without the required role."""
    return HttpRefused(
        403,
        AuthError(
            "this token does not permit this request",
            given=f"the token of {identity.role} {identity.name}",
            remedy="use a token with this right: `atoll login` with a ticket from "
            "`atoll ticket new --role operator` on the hub's machine",
        ),
    )


def number(
    request: Request, name: str, default: float, *, low: float = 0, high: float = 2**62
) -> float:
    """Return a number from the query, clamped to its bounds; raises ConfigError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value:
        raise ConfigError(f"{name} in the address must be a number", given=repr(text[:100]))
    return min(max(value, low), high)


async def body_as(request: Request, kind: type[T]) -> T:
    """Decode the JSON body; raises ConfigError."""
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError("the body of the request is wrong", given=str(error)[:300]) from error
