"""A small hub on a real socket: sessions, relay with credit, and switches to break it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from atoll.errors import AuthError, HubError
from atoll.net.event_loop import LoopThread
from atoll.net.handshake import make_hello
from atoll.net.sync_link import SyncLink, connect
from atoll.wire.frames import Kind, decode, decode_relay
from atoll.wire.limits import MAX_FRAME_BYTES, WINDOW_BYTES
from atoll.wire.messages import (
    Acked,
    Beat,
    Credit,
    Done,
    Envelope,
    Failure,
    Hello,
    LogLines,
    Message,
    Metrics,
    QueueClaim,
    Roster,
    RosterReply,
    Undeliverable,
    Welcome,
    pack,
    unpack,
)
from tests.patience import PATIENCE_S

TOKEN = "right"


class SmallHub:
    """Runs in a thread; `with SmallHub() as hub: connect(hub.url, ...)`."""

    def __init__(self) -> None:
        self._thread = LoopThread(name="small hub")
        self._server: Server | None = None
        self.port = 0
        self.sessions: dict[str, ServerConnection] = {}
        self.received: list[Message] = []
        self.answer: Callable[[Message], Message] = answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shut()
        self._thread.stop()

    def open(self) -> None:
        """Listen, on the port of before if there was one."""
        self._thread.run(self._open(), timeout_s=PATIENCE_S)

    def shut(self) -> None:
        """Stop listening and cut every connection without a word."""
        self._thread.run(self._shut(), timeout_s=PATIENCE_S)

    def cut(self) -> None:
        """Cut every connection; new ones are taken."""
        self._thread.run(self._cut(), timeout_s=PATIENCE_S)

    def tell(self, session: str, notice: Message) -> None:
        """Send a notice to a session."""
        self._thread.run(self.sessions[session].send(pack(notice)), timeout_s=PATIENCE_S)

    async def _open(self) -> None:
        self._server = await serve(
            self._serve,
            "127.0.0.1",
            self.port,
            compression=None,
            ping_interval=None,
            max_size=MAX_FRAME_BYTES,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close(close_connections=False)
            await self._cut()
            await self._server.wait_closed()
            self._server = None

    async def _cut(self) -> None:
        if self._server is not None:
            for connection in list(self._server.connections):
                connection.transport.abort()

    async def _serve(self, connection: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            session = await self._greet(connection)
            if session:
                async for message in connection:
                    await self._dispatch(session, connection, bytes(message))  # type: ignore[arg-type]

    async def _greet(self, connection: ServerConnection) -> str:
        envelope = unpack(decode(await connection.recv(decode=False)))
        assert isinstance(envelope.body, Hello)
        if envelope.body.token != TOKEN:
            failure = Failure(AuthError("this token is unknown").to_dict())
            await connection.send(pack(failure, id=envelope.id, reply=True))
            await connection.close(1008)
            return ""
        self.sessions[envelope.body.session] = connection
        welcome = Welcome("small", WINDOW_BYTES, 1.0, False)
        await connection.send(pack(welcome, id=envelope.id, reply=True))
        return envelope.body.session

    async def _dispatch(self, session: str, connection: ServerConnection, message: bytes) -> None:
        frame = decode(message)
        if frame.kind is Kind.CONTROL:
            envelope: Envelope = unpack(frame)
            self.received.append(envelope.body)
            if envelope.id and not isinstance(envelope.body, QueueClaim):  # claims wait for ever
                reply = self.answer(envelope.body)
                await connection.send(pack(reply, id=envelope.id, reply=True))
            return
        to = decode_relay(frame).to
        receiver = self.sessions.get(to)
        if receiver is None:
            await connection.send(pack(Credit(to, len(message))))
            await connection.send(pack(Undeliverable(to)))
            return
        asyncio.ensure_future(self._forward(connection, receiver, to, message))  # noqa: RUF006

    async def _forward(
        self, sender: ServerConnection, receiver: ServerConnection, to: str, message: bytes
    ) -> None:
        with contextlib.suppress(ConnectionClosed):
            await receiver.send(message)
            await sender.send(pack(Credit(to, len(message))))


def answer(body: Message) -> Message:
    """Return what this hub answers."""
    if isinstance(body, Roster):
        return RosterReply([])
    if isinstance(body, Metrics):
        return Acked(body.seq + len(body.points) - 1)
    if isinstance(body, LogLines):
        return Acked(body.seq + len(body.lines) - 1)
    if isinstance(body, Beat):
        return Done()
    return Failure(HubError("not today", given=type(body).__name__).to_dict())


@contextlib.contextmanager
def linked(hub: SmallHub, *sessions: str) -> Iterator[list[SyncLink]]:
    """Open one link per session and close them all."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(connect(hub.url, make_hello(session, TOKEN), timeout_s=PATIENCE_S))
            for session in sessions
        ]
