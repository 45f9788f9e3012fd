"""Sessions: one per process, over one WebSocket at a time.

A session outlives its connection: the same incarnation may reconnect and gets the frames that were
queued for it. It is *lost* when it was disconnected for longer than the grace, or silent for longer
than `DEAD_AFTER_S`. A new incarnation at the same address replaces the old process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from atoll import __version__
from atoll.clock import Clock
from atoll.errors import AtollError, AuthError, FrameTooLarge, WireError
from atoll.hub.security.auth import PROGRAM, Auth, Identity
from atoll.hub.security.forwarded import source_of
from atoll.hub.sessions.closing import (
    POLICY,
    REPLACED,
    RESTART,
    SILENT,
    TOO_LARGE,
    close,
    refuse,
)
from atoll.hub.sessions.handshake import (
    MAX_ADDRESS,
    ClockOffset,
    ReplacedProcesses,
    check_hello,
    first_message,
    of_another_site,
)
from atoll.hub.sessions.listener import Listener as Listener
from atoll.hub.sessions.relay import Relay
from atoll.hub.sessions.request_meter import (
    FRAMES_PER_S,
    HTTP_COST,
    LARGE_BYTES,
    RequestMeter,
    cost_of,
)
from atoll.hub.sessions.send_queue import Send, SendQueue
from atoll.hub.tasks import Tasks
from atoll.wire.frames import Kind, decode
from atoll.wire.limits import DEAD_AFTER_S, HEARTBEAT_S, MAX_FRAME_BYTES, WINDOW_BYTES
from atoll.wire.messages import (
    Credit,
    Envelope,
    Hello,
    Message,
    NodeInfo,
    Undeliverable,
    Welcome,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

TURN_S = 0.002
"""A session yields to the others after so much handling, even if more of its frames have come."""

STALLED_S = 2.0
"""A longer pause between two sweeps means that the hub itself stalled, not its peers."""


@dataclass(eq=False)
class Session:
    """One process, as the hub sees it."""

    address: str
    incarnation: str
    identity: Identity
    info: NodeInfo | None
    send_queue: SendQueue
    last_seen: float
    """Monotonic time of the last frame."""
    generation: int = 0
    """Number of its connection; grows with every connection to the hub."""
    window_bytes: int = WINDOW_BYTES
    """Relay window per receiver on the current connection."""
    connected: bool = False
    gone_since: float = 0.0
    """Monotonic time when the connection ended."""
    stats: dict[str, float] = field(default_factory=dict)
    clock: ClockOffset = field(default_factory=ClockOffset)
    requests: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Requests without an answer yet, by number."""
    notices: int = 0
    """Notices that are being handled."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Its reports are stored one after the other, see `MessageRouter`."""
    meter: RequestMeter = field(default_factory=RequestMeter)
    source: str = ""
    hang_up: Callable[[int, str], None] = lambda code, reason: None

    @property
    def job(self) -> str:
        """The job of a member or reducer; empty for a node."""
        return self.address.partition("/")[0] if "/" in self.address else ""

    @property
    def member(self) -> str:
        """`w3` or `reducer`; empty for a node."""
        return self.address.partition("/")[2]

    def notify(self, body: Message) -> None:
        """Queue a notice."""
        self._put(pack(body), transient=isinstance(body, Credit | Undeliverable))

    def answer(self, envelope: Envelope, body: Message) -> None:
        """Queue the answer to a request."""
        self._put(pack(body, id=envelope.id, reply=True))

    def _put(self, frame: bytes, *, transient: bool = False) -> None:
        if not self.send_queue.put_control(frame, transient=transient):
            self.hang_up(POLICY, "too many unread bytes")


class Sessions:
    """All sessions of the hub, and the ASGI endpoint that opens them."""

    def __init__(
        self,
        *,
        auth: Auth,
        clock: Clock,
        tasks: Tasks,
        hello_timeout_s: float = 10.0,
        reconnect_grace_s: float = 5.0,
        dead_after_s: float = DEAD_AFTER_S,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        self._auth = auth
        self._clock = clock
        self._tasks = tasks
        self._hello_timeout_s = hello_timeout_s
        self._grace_s = reconnect_grace_s
        self._dead_after_s = dead_after_s
        self._sessions: dict[str, Session] = {}
        self._generation = 0
        self._swept_at = clock.monotonic()
        self._replaced = ReplacedProcesses()
        self.relay = Relay(self, window_bytes=window_bytes)
        self.listener: Listener | None = None
        self.admit: Callable[[Identity, Scope], None] = lambda identity, scope: None
        """Raises AuthError or LimitReached if a connection may not use an identity."""
        self.limits_of: Callable[[str], dict[str, int]] = lambda address: {}
        """Returns the limits of the process at an address, sent in its Welcome."""
        self.pause_of: Callable[[Identity, float], float] = lambda identity, cost: 0.0
        """Counts frames of a token; returns the seconds to wait before its next one is read."""
        self.stranger_pause_of: Callable[[str], float] = lambda source: 0.0
        """The same for an address without a valid token."""
        self.frames_per_s = FRAMES_PER_S

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, address: str) -> Session | None:
        """Return the session at an address, connected or within its grace."""
        return self._sessions.get(address)

    def all(self) -> list[Session]:
        """Return every session."""
        return list(self._sessions.values())

    def notify(self, address: str, body: Message) -> bool:
        """Queue a notice for an address; return False if there is no session."""
        session = self._sessions.get(address)
        if session is not None:
            session.notify(body)
        return session is not None

    # -------------------------------------------------------------------------- connections

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket with plain ASGI instead of starlette: the relay is the hot path."""
        await receive()
        if of_another_site(scope):
            await send({"type": "websocket.close", "code": POLICY})  # answered with 403
            return
        await send({"type": "websocket.accept"})
        try:
            hello, session, resumed = await self._handshake(scope, receive)
        except AtollError as error:
            self._report_rejected(getattr(error, "peer", ""), error, scope)
            await asyncio.sleep(self.stranger_pause_of(source_of(scope)))
            await refuse(send, getattr(error, "hello_id", 0), error)
            return
        if hello is None or session is None:
            return
        broken = await self._run_connection(session, hello, receive, send, resumed=resumed)
        if broken is not None:
            self._report_rejected(session.address, broken, scope, job=session.job)
            await refuse(send, 0, broken)

    async def _handshake(
        self, scope: Scope, receive: Receive
    ) -> tuple[Envelope | None, Session | None, bool]:
        """Read the Hello and open or resume its session; raises AtollError with `hello_id`."""
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                message = await receive()
        except TimeoutError:
            raise AuthError(
                "no Hello arrived", expected=f"within {self._hello_timeout_s:g} s of connecting"
            ) from None
        if message["type"] != "websocket.receive":
            return None, None, False
        envelope = first_message(message)
        source = source_of(scope)
        try:
            hello, identity = check_hello(envelope.body, auth=self._auth, source=source)
            self.admit(identity, scope)
            if pause_s := self.pause_of(identity, HTTP_COST):  # reconnects too often
                await asyncio.sleep(pause_s)
                # Its token may have been revoked meanwhile.
                hello, identity = check_hello(envelope.body, auth=self._auth, source=source)
            self._replaced.check(hello)
        except AtollError as error:
            vars(error)["hello_id"] = envelope.id
            vars(error)["peer"] = getattr(envelope.body, "session", "")[:MAX_ADDRESS]
            raise
        session, resumed = self._attach(hello, identity)
        session.source = source
        return envelope, session, resumed

    def _attach(self, hello: Hello, identity: Identity) -> tuple[Session, bool]:
        session = self._sessions.get(hello.session)
        resumed = session is not None and session.incarnation == hello.incarnation
        if session is not None:
            session.hang_up(REPLACED, "another connection took this session over")
            if not resumed:
                self._replaced.add(session.address, session.incarnation)
                self._end(session)
        if session is None or not resumed:
            address = hello.session
            session = Session(
                address=address,
                incarnation=hello.incarnation,
                identity=identity,
                info=hello.info,
                send_queue=SendQueue(
                    on_written=lambda frame: self.relay.frame_written(address, frame)
                ),
                last_seen=self._clock.monotonic(),
                meter=RequestMeter(self.frames_per_s),
            )
            self._sessions[address] = session
        session.send_queue.drop_transient()
        self._generation += 1
        session.generation = self._generation
        session.window_bytes = self.relay.window_for(len(self._sessions))
        session.info = hello.info or session.info
        session.last_seen = self._clock.monotonic()
        session.connected = True
        return session, resumed

    async def _run_connection(
        self, session: Session, hello: Envelope, receive: Receive, send: Send, *, resumed: bool
    ) -> WireError | None:
        """Send Welcome, then read and write until either side ends; return a protocol error."""
        generation = session.generation
        task = asyncio.current_task()
        closing: list[tuple[int, str]] = []
        broken: WireError | None = None

        def hang_up(code: int, reason: str) -> None:
            if not closing and task is not None:
                closing.append((code, reason))
                task.cancel()

        session.hang_up = hang_up
        limits = self.limits_of(session.address)
        welcome = Welcome(__version__, session.window_bytes, HEARTBEAT_S, resumed, limits)
        writer: asyncio.Task[None] | None = None
        try:
            frame = pack(welcome, id=hello.id, reply=True)
            await send({"type": "websocket.send", "bytes": frame})
            writer = asyncio.create_task(session.send_queue.drain(send), name="session writer")
            if self.listener is not None:
                self.listener.opened(session, resumed=resumed)
            await self._read(session, receive)
        except asyncio.CancelledError:
            if not closing:
                raise
            if task is not None:
                task.uncancel()
        except WireError as error:
            broken = error
        except OSError as error:
            logger.debug("%s: connection broke: %s", session.address, error)
        finally:
            if session.generation == generation:
                session.connected = False
                session.gone_since = self._clock.monotonic()
                session.hang_up = lambda code, reason: None
            await _stop(writer)
        if broken is None and closing:
            await close(send, *closing[0])
        return broken

    async def _read(self, session: Session, receive: Receive) -> None:
        clock, turn_s = self._clock, 0.0
        while True:
            message = await receive()
            session.last_seen = clock.monotonic()
            if message["type"] != "websocket.receive":
                if message.get("code") == TOO_LARGE:  # the server has closed already
                    raise FrameTooLarge(
                        "a frame is too large", expected=f"at most {MAX_FRAME_BYTES} bytes"
                    )
                return
            data = message.get("bytes")
            if data is None:
                raise WireError("unexpected text message", expected="binary messages only")
            pause_s = self._received(session, data)
            # `receive` does not yield if a frame is queued. Only what handling takes is counted:
            # a session that waited has yielded.
            turn_s += clock.monotonic() - session.last_seen
            if pause_s or turn_s > TURN_S:
                turn_s = 0.0
                await asyncio.sleep(pause_s)  # of this session's own connection only

    def _received(self, session: Session, data: bytes) -> float:
        """Handle a frame; return the seconds to wait before the next one of its session is read."""
        frame = decode(data)
        if frame.kind is Kind.RELAY:
            if session.identity.role == PROGRAM:
                raise WireError("a program uses queues only", given="a payload for a member")
            self.relay.forward(session, frame)
            if len(data) >= LARGE_BYTES:
                return 0.0  # credits limit these
            cost = 1.0
        else:
            envelope = unpack(frame)
            cost = cost_of(envelope.body, len(data))
            if self.listener is not None:
                self.listener.received(session, envelope)
        pause_s = session.meter.took(session.last_seen, cost)
        return max(pause_s, self.pause_of(session.identity, cost))

    def _report_rejected(
        self, peer: str, error: AtollError, scope: Scope, *, job: str = ""
    ) -> None:
        """Pass a rejection on; `job` is set for authenticated peers only."""
        if self.listener is not None:
            self.listener.rejected(peer, error, job=job, source=source_of(scope))

    # ----------------------------------------------------------------------------- lifetime

    def sweep(self) -> None:
        """End sessions that were silent or disconnected for too long."""
        now = self._clock.monotonic()
        late, self._swept_at = now - self._swept_at > STALLED_S, now
        if late:
            return  # this process was held up; what came in meanwhile is read first
        for session in self.all():
            if session.connected:
                if now - session.last_seen > self._dead_after_s:
                    logger.warning("%s has been silent for too long", session.address)
                    session.hang_up(SILENT, "no message for too long")
                    self._end(session)
            elif now - session.gone_since > self._grace_s:
                self._end(session)

    def end(self, address: str) -> None:
        """End a session whose process has exited."""
        session = self._sessions.get(address)
        if session is not None:
            session.hang_up(RESTART, "the process of this session has ended")
            self._end(session)

    def _end(self, session: Session) -> None:
        if self._sessions.get(session.address) is session:
            del self._sessions[session.address]
        for request in list(session.requests.values()):
            request.cancel()
        self.relay.receiver_lost(session)
        if self.listener is not None:
            self.listener.lost(session)


async def _stop(writer: asyncio.Task[None] | None) -> None:
    if writer is not None and not writer.done():
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
