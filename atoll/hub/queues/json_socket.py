"""Queues and topics for programs in any language: JSON texts over a WebSocket.

    > {"token": "..."}                                      unless the Authorization header has it
    < {"welcome": "0.1.0"}
    > {"id": 1, "do": "put", "queue": "pool/work", "key": "k1", "value": {"seed": 7}}
    < {"id": 1, "done": {"seq": 1, "duplicate": false}}
    < {"id": 2, "error": {"kind": "...", "what": "...", ...}}

Requests are handled concurrently: a waiting claim delays no other. When a connection closes, its
claims and reads are cancelled; its other requests are completed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from atoll import __version__
from atoll.errors import AtollError, AuthError, ConfigError, HubError, unknown
from atoll.hub.queues.handlers import QueueHandlers
from atoll.hub.queues.json_messages import as_message, shown
from atoll.hub.security.auth import Auth, Identity
from atoll.hub.security.forwarded import source_of
from atoll.hub.sessions.handshake import of_another_site
from atoll.hub.sessions.request_meter import ITEM_BYTES_PER_FRAME, cost_of
from atoll.hub.sessions.session import Sessions
from atoll.ids import new_token
from atoll.wire.messages import (
    Message,
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueExtend,
    QueueExtendMany,
    QueueOpen,
    QueuePut,
    QueuePutMany,
    QueueRelease,
    TopicAck,
    TopicPublish,
    TopicRead,
)

logger = logging.getLogger(__name__)

PATH = "/api/queues/socket"

VERBS: dict[str, type[Message]] = {
    "open": QueueOpen, "put": QueuePut, "put_many": QueuePutMany, "claim": QueueClaim,
    "ack": QueueAck, "ack_many": QueueAckMany, "extend": QueueExtend,
    "extend_many": QueueExtendMany, "release": QueueRelease, "publish": TopicPublish,
    "read": TopicRead, "topic_ack": TopicAck,
}  # fmt: skip
"""Values of `do`, and the type of message of each."""

MAX_OPEN = 256
"""Requests of one connection without an answer; more are refused."""
MAX_TEXT = 8 * 2**20
"""Longest text, in characters."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Asker:
    identity: Identity
    address: str
    incarnation: str


class JsonSockets:
    """Serves the connections.

    Args:
        handlers: Of the messages.
        auth: Checks tokens.
        sessions: Its rules on who may connect, and on how much may be sent, apply here, too.
        hello_timeout_s: How long to wait for the token.
    """

    def __init__(
        self,
        handlers: QueueHandlers,
        *,
        auth: Auth,
        sessions: Sessions,
        hello_timeout_s: float = 10.0,
    ) -> None:
        self._handlers = handlers
        self._auth = auth
        self._sessions = sessions
        self._hello_timeout_s = hello_timeout_s

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection until its end."""
        await receive()
        if of_another_site(scope):
            await send({"type": "websocket.close", "code": 1008})  # answered with 403
            return
        await send({"type": "websocket.accept"})
        try:
            identity = await self._identify(scope, receive)
        except AtollError as error:
            await asyncio.sleep(self._sessions.stranger_pause_of(source_of(scope)))
            with contextlib.suppress(OSError):
                await _say(send, {"error": error.to_dict()})
                await send({"type": "websocket.close", "code": 1008})
            return
        if identity is None:
            return
        await _say(send, {"welcome": __version__})
        asker = _Asker(identity, f"{identity.role}/{identity.name}", new_token())
        await _Connection(asker, self._handlers, send, self._sessions.pause_of).run(receive)

    async def _identify(self, scope: Scope, receive: Receive) -> Identity | None:
        """Return the client's identity; None: it disconnected. Raises AuthError, ConfigError."""
        headers = {name.decode("latin-1").lower(): value for name, value in scope["headers"]}
        kind, _, token = headers.get("authorization", b"").decode("latin-1").partition(" ")
        if kind.lower() != "bearer":
            try:
                async with asyncio.timeout(self._hello_timeout_s):
                    message = await receive()
            except TimeoutError:
                raise AuthError("a token is missing", expected='{"token": "..."} first') from None
            if message["type"] != "websocket.receive":
                return None
            token = str(_object(message).get("token", ""))
        identity = self._auth.authenticate(token.strip(), source=source_of(scope))
        self._sessions.admit(identity, scope)
        return identity


class _Connection:
    """One authenticated connection."""

    def __init__(
        self, asker: _Asker, handlers: QueueHandlers, send: Send,
        pause_of: Callable[[Identity, float], float],
    ) -> None:  # fmt: skip
        self._asker, self._handlers, self._send = asker, handlers, send
        self._pause_of = pause_of
        self._open: dict[asyncio.Task[None], type[Message]] = {}
        self._count = 0

    async def run(self, receive: Receive) -> None:
        """Read requests until the other side ends."""
        try:
            while (message := await receive())["type"] == "websocket.receive":
                text = message.get("text") or message.get("bytes") or ""
                cost = await self._begin(message)
                cost += len(text) // ITEM_BYTES_PER_FRAME
                if pause_s := self._pause_of(self._asker.identity, cost):
                    await asyncio.sleep(pause_s)  # of this connection only
        finally:
            for task, kind in list(self._open.items()):
                if kind in (QueueClaim, TopicRead):
                    task.cancel()

    async def _begin(self, message: MutableMapping[str, Any]) -> float:
        """Start handling a request; return its cost."""
        id_: Any = None
        try:
            fields = _object(message)
            id_ = fields.pop("id", None)
            verb = fields.pop("do", "")
            if not isinstance(verb, str) or verb not in VERBS:
                raise unknown("verb", str(verb)[:50], VERBS)
            if len(self._open) >= MAX_OPEN:
                raise HubError("too many open requests", expected=f"at most {MAX_OPEN}")
            body = as_message(fields, VERBS[verb])
        except AtollError as error:
            await _say(self._send, {"id": id_, "error": error.to_dict()})
            return 1.0
        self._count += 1
        task = asyncio.create_task(self._answer(id_, body, self._count))
        self._open[task] = type(body)
        task.add_done_callback(lambda done: self._open.pop(done, None))
        return cost_of(body, 0)

    async def _answer(self, id_: Any, body: Message, number: int) -> None:
        try:
            done = await self._handlers.handlers[type(body)](self._asker, body, number)
            reply: dict[str, Any] = {"id": id_, "done": shown(done)}
        except AtollError as error:
            reply = {"id": id_, "error": error.to_dict()}
        except Exception:
            logger.exception("%s of %s failed", type(body).__name__, self._asker.address)
            failure = HubError("the hub failed on this request", remedy="see the hub's log")
            reply = {"id": id_, "error": failure.to_dict()}
        with contextlib.suppress(OSError, RuntimeError):  # it is gone
            await _say(self._send, reply)


def _object(message: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the object in a frame; raises ConfigError."""
    text = message.get("text")
    text = text if text is not None else message.get("bytes") or b""
    if len(text) > MAX_TEXT:
        raise ConfigError("this message is too long", given=len(text), expected=f"{MAX_TEXT}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("this message is no JSON", given=str(error)[:200]) from error
    if not isinstance(found, dict):
        raise ConfigError("this message is no object", given=type(found).__name__)
    return found


async def _say(send: Send, value: dict[str, Any]) -> None:
    await send({"type": "websocket.send", "text": json.dumps(value)})
