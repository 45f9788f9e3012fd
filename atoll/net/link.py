"""One session with the hub, kept alive by itself.

A `Link` dials, says Hello, notices a dead hub, reconnects with backoff and sends unanswered
requests again under the same number. Its user sees requests that take longer while the hub is
away, and `on_reconnect`. What it cannot repair (a token that the hub refuses, another version, a
newer process in its place) ends it: `failed` is set and every waiting and later call raises that
error.

All methods belong to one event loop; `sync_link` is the seam for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, DeadlineExceeded, HubError, HubUnreachable, from_dict
from atoll.net.connection import Connection
from atoll.net.counters import LinkCounters
from atoll.net.credit import Credits, peer_lost
from atoll.net.gate import ReadingGate
from atoll.net.greeting import greet, is_final, make_hello, refusal
from atoll.net.retry import backoff
from atoll.net.transport import ConnectionLost, Dial
from atoll.net.way import PLAIN, Way
from atoll.net.websocket import dial as dial_websocket
from atoll.wire.frames import Buffer, Frame, Kind, decode_relay, encode_relay
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import (
    Credit,
    Envelope,
    Failure,
    Hello,
    Message,
    NodeInfo,
    Undeliverable,
    Welcome,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

Parts = tuple[Buffer, Buffer]
"""Head and piece of a relayed chunk, as `pack_chunk` returns them."""


class _Asked:
    """A request that has no answer yet."""

    __slots__ = ("frame", "future")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class Link:
    """One session with the hub."""

    def __init__(
        self,
        dial: Dial,
        hello: Hello,
        *,
        clock: Clock | None = None,
        stats: Callable[[], dict[str, float]] | None = None,
        retry: Callable[[], Iterator[float]] = backoff,
        dead_after_s: float = DEAD_AFTER_S,
    ) -> None:
        """Make a link; nothing is opened before `start`.

        Args:
            dial: Opens a connection.
            hello: First message of each connection.
            clock: Source of time for deadlines and for the hub's silence.
            stats: Figures for the heartbeat; called every few seconds, must be quick.
            retry: Waits between attempts to reconnect.
            dead_after_s: Silence of the hub after which a connection is given up.
        """
        self._dial = dial
        self._hello = hello
        self._clock = clock or RealClock()
        self._stats = stats or dict
        self._retry = retry
        self._dead_after_s = dead_after_s
        self._ids = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._credits = Credits()
        self._gate = ReadingGate()
        self._connection: Connection | None = None
        self._opened = 0
        self._task: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[AtollError] | None = None
        self._notice_handlers: list[Callable[[Message], None]] = []
        self._relay_handlers: list[Callable[[str, memoryview], None]] = []
        self._reconnect_handlers: list[Callable[[], None]] = []
        self._failure_handlers: list[Callable[[AtollError], None]] = []
        self.counters = LinkCounters()
        self.welcome: Welcome | None = None
        self.failed: AtollError | None = None

    # ------------------------------------------------------------------------- what it is

    @property
    def session(self) -> str:
        """Own address on the hub."""
        return self._hello.session

    @property
    def incarnation(self) -> str:
        """What tells this process from others under the same address."""
        return self._hello.incarnation

    @property
    def connected(self) -> bool:
        """Whether a connection is open and welcomed at this moment."""
        return self._connection is not None

    def owed_bytes(self, to: str) -> int:
        """Return how many relayed bytes to `to` the hub has not credited yet."""
        return self._credits.owed_bytes(to)

    def on_notice(self, handler: Callable[[Message], None]) -> None:
        """Call `handler` with every notice of the hub, in order; it must not block."""
        self._notice_handlers.append(handler)

    def on_relay(self, handler: Callable[[str, memoryview], None]) -> None:
        """Call `handler(source, payload)` with every relayed payload, its checksum verified."""
        self._relay_handlers.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` when the connection is back after a break."""
        self._reconnect_handlers.append(handler)

    def on_failure(self, handler: Callable[[AtollError], None]) -> None:
        """Call `handler` once when the link has ended for good, or is closed."""
        self._failure_handlers.append(handler)

    def hold_reading(self) -> None:
        """Read no further frames until released; see `ReadingGate` for the one exception."""
        self._gate.hold()

    def release_reading(self) -> None:
        """Read again."""
        self._gate.release()

    # ------------------------------------------------------------------------ life, death

    async def start(self, *, timeout_s: float, patient: bool = False) -> Welcome:
        """Open the first connection.

        Args:
            timeout_s: Time for it.
            patient: Keep trying while no hub answers, until the time is up.

        Raises:
            HubUnreachable: no hub answers there; says why.
            AuthError: the hub refuses the token.
            VersionMismatch: the hub speaks another version.
        """
        self._ended = asyncio.get_running_loop().create_future()
        last: AtollError | None = None
        try:
            async with asyncio.timeout(timeout_s):
                for wait_s in self._retry():
                    try:
                        connection = await self._connect()
                        break
                    except HubUnreachable as error:
                        if not patient:
                            raise
                        if last is None:
                            logger.warning("%s waits for its hub: %s", self.session, error)
                        last = error
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            raise last or HubUnreachable(
                "the hub did not answer in time", given=f"{timeout_s:g} s"
            ) from None
        self._task = asyncio.create_task(self._keep(connection), name=f"link {self.session}")
        return connection.welcome

    async def close(self, body: Message | None = None, *, timeout_s: float = 5.0) -> None:
        """Say last words as a request, wait for their answer, and close for good.

        Raises:
            AtollError: the last words were not accepted, or not answered in time.
        """
        try:
            if body is not None and self.failed is None:
                await self.request(body, timeout_s=timeout_s)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            self._fail(HubError("this link to the hub is closed", given=self.session))

    async def wait_failed(self) -> AtollError:
        """Wait until the link has ended for good and return why."""
        if self._ended is None:
            raise self._not_started()
        return await asyncio.shield(self._ended)

    # ---------------------------------------------------------------------------- talking

    async def request(self, body: Message, *, timeout_s: float) -> Message:
        """Return the hub's answer; the request is sent again after each reconnect.

        Raises:
            DeadlineExceeded: no answer came within `timeout_s`.
            AtollError: what the hub answered, if it could not do it.
        """
        self._check()
        id = next(self._ids)
        asked = _Asked(pack(body, id=id))
        self._asked[id] = asked
        try:
            with self._gate.kept_open():
                async with asyncio.timeout(timeout_s):
                    await self._send_control(asked.frame)
                    return await asked.future
        except TimeoutError:
            raise self._late(f"{type(body).__name__} was not answered in time", timeout_s) from None
        finally:
            del self._asked[id]

    async def notify(self, body: Message) -> None:
        """Send a notice; while the hub is away it is dropped."""
        self._check()
        await self._send_control(pack(body))

    async def relay(self, to: str, parts: Parts, *, deadline: float) -> int:
        """Send one chunk to session `to`; waits for credit, and while the hub is away.

        A chunk that was in a connection when it broke is lost without an error here: watch
        `on_reconnect`.

        Returns:
            Bytes sent, with the frame's header.

        Raises:
            PeerLost: the hub says that nobody is at `to`.
            DeadlineExceeded: the monotonic time `deadline` passed.
        """
        return await self.relay_all(to, (parts,), deadline=deadline)

    async def relay_all(self, to: str, parts: Iterable[Parts], *, deadline: float) -> int:
        """Send many chunks in order, e.g. a whole packet; otherwise as `relay`."""
        self._check()
        losses = self._credits.losses(to)
        sent_bytes = 0
        timeout_s = deadline - self._clock.monotonic()
        try:
            with self._gate.kept_open():
                async with asyncio.timeout(timeout_s):
                    for head, piece in parts:
                        if self._credits.losses(to) != losses:
                            raise peer_lost(to)
                        frame = encode_relay(to, self.session, head, piece)
                        await self._relay(to, frame)
                        sent_bytes += len(frame)
        except TimeoutError:
            raise self._late(f"{to} did not take all chunks in time", timeout_s) from None
        return sent_bytes

    async def _relay(self, to: str, frame: bytes) -> None:
        """Send one relay frame, on the next connection if this one breaks."""
        while True:
            number = await self._credits.acquire(to, len(frame))
            connection = self._connection
            if connection is None or connection.number != number:
                continue
            try:
                return await connection.send(frame, kind=Kind.RELAY)
            except ConnectionLost:
                self._disconnected(connection)

    async def _send_control(self, frame: bytes) -> None:
        """Send if connected. The reader notices a break, and requests are sent again then."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionLost):
                await self._connection.send(frame, kind=Kind.CONTROL)

    # ------------------------------------------------------------------------- connections

    async def _connect(self) -> Connection:
        """Dial, greet, and make the new connection the present one."""
        transport = await self._dial()
        try:
            welcome, sent, received = await greet(transport, self._hello, id=next(self._ids))
        except BaseException:
            await transport.close()
            raise
        self.counters.sent_control_bytes += sent
        self.counters.received_control_bytes += received
        self._opened += 1
        self.welcome = welcome
        self._connection = Connection(
            transport,
            number=self._opened,
            welcome=welcome,
            clock=self._clock,
            counters=self.counters,
            ids=self._ids,
        )
        self._credits.open(welcome.window_bytes, generation=self._opened)
        return self._connection

    def _disconnected(self, connection: Connection) -> None:
        """Forget a connection that broke, if it is still the present one."""
        if self._connection is connection:
            self._connection = None
            self._credits.shut()

    async def _keep(self, connection: Connection) -> None:
        """Serve connections, one after the other, until a final error."""
        waits = self._retry()
        try:
            while True:
                since = self._clock.monotonic()
                error = await self._serve(connection)
                if self._clock.monotonic() - since > self._dead_after_s:
                    waits = self._retry()  # it had been a good one: begin with short waits
                connection = await self._reconnect(error, waits)
                await self._resume()
        except AtollError as error:
            logger.warning("%s: the link to the hub ended: %s", self.session, error)
            self._fail(error)
        except Exception as error:
            logger.exception("%s: the link to the hub failed", self.session)
            self._fail(HubError("the link to the hub failed", given=repr(error)))

    async def _serve(self, connection: Connection) -> AtollError:
        """Serve one connection to its end; return why it ended."""
        try:
            error = await connection.serve(
                self._take, gate=self._gate, stats=self._stats, dead_after_s=self._dead_after_s
            )
        finally:
            self._disconnected(connection)
        logger.info("%s: %s", self.session, error)
        return error

    async def _reconnect(self, error: AtollError, waits: Iterator[float]) -> Connection:
        """Return the next connection, however long it takes; raise an error that is final."""
        while not is_final(error):
            await asyncio.sleep(next(waits))
            try:
                return await self._connect()
            except AtollError as failure:
                logger.info("%s: not connected again yet: %s", self.session, failure)
                error = failure
        raise refusal(error, session=self.session)

    async def _resume(self) -> None:
        """After a reconnect: ask again what was not answered, then tell the listeners."""
        self.counters.reconnects += 1
        logger.info("%s: connected to the hub again", self.session)
        for asked in list(self._asked.values()):
            if not asked.future.done():
                await self._send_control(asked.frame)
        for handler in self._reconnect_handlers:
            _call(handler)

    # --------------------------------------------------------------------------- incoming

    def _take(self, frame: Frame) -> None:
        """Dispatch one frame."""
        if frame.kind is Kind.CONTROL:
            envelope = unpack(frame)
            if envelope.reply and envelope.id:
                self._answered(envelope)
            else:
                self._noticed(envelope.body)
            return
        relay = decode_relay(frame)
        for handler in self._relay_handlers:
            _call(handler, relay.source, relay.payload)

    def _answered(self, envelope: Envelope) -> None:
        """Hand an answer to its request; a second or late answer is dropped."""
        asked = self._asked.get(envelope.id)
        if asked is None or asked.future.done():
            return  # a heartbeat's answer, or one that came twice or too late
        if isinstance(envelope.body, Failure):
            asked.future.set_exception(from_dict(envelope.body.error))
        else:
            asked.future.set_result(envelope.body)

    def _noticed(self, body: Message) -> None:
        """Keep the books of credit, and tell the listeners everything else."""
        if isinstance(body, Credit):
            self._credits.release(body.to, body.nbytes, generation=self._opened)
            return
        if isinstance(body, Undeliverable):
            self._credits.lose(body.to)
        elif isinstance(body, Failure):
            logger.warning("%s: the hub says: %s", self.session, from_dict(body.error))
        for handler in self._notice_handlers:
            _call(handler, body)

    # ------------------------------------------------------------------------------- ends

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._task is None:
            raise self._not_started()

    def _not_started(self) -> HubError:
        return HubError("this link to the hub was not started", given=self.session)

    def _fail(self, error: AtollError) -> None:
        """End for good: everybody who waits gets the error. The first error stays."""
        self._connection = None
        if self.failed is not None:
            return
        self.failed = error
        self._credits.fail(error)
        for asked in self._asked.values():
            if not asked.future.done():
                asked.future.set_exception(error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
        for handler in self._failure_handlers:
            _call(handler, error)

    def _late(self, what: str, timeout_s: float) -> DeadlineExceeded:
        """Return the error for a wait that ended; says if the hub is away."""
        away = "" if self.connected else ", and the hub is not connected"
        return DeadlineExceeded(
            what,
            given=f"{timeout_s:.3g} s{away}",
            remedy="see whether the hub runs and the network works" if away else None,
        )


async def open_link(
    url: str,
    *,
    session: str,
    token: str,
    way: Way = PLAIN,
    info: NodeInfo | None = None,
    incarnation: str | None = None,
    stats: Callable[[], dict[str, float]] | None = None,
    timeout_s: float = 20.0,
    patient: bool = False,
) -> Link:
    """Return a started link to the hub at `url`; see `Link.start` for what it raises."""
    hello = make_hello(session=session, token=token, incarnation=incarnation, info=info)
    dial_s = min(timeout_s, 10.0)
    link = Link(lambda: dial_websocket(url, way=way, timeout_s=dial_s), hello, stats=stats)
    await link.start(timeout_s=timeout_s, patient=patient)
    return link


def _call(handler: Callable[..., None], *arguments: object) -> None:
    """Call a listener; its failure is its own, the session goes on."""
    try:
        handler(*arguments)
    except Exception:
        logger.exception("a listener of the link to the hub failed")
