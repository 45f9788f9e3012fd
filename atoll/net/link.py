"""One session with the hub that reconnects by itself.

A `Link` connects, sends Hello, detects a dead hub, reconnects with backoff, and repeats unanswered
requests under the same id. Without a hub its users see slower requests, and `on_reconnect`
afterwards. An error that reconnecting cannot repair (a rejected token, another version, a newer
process in its place) ends the link: `failed` is set, and every waiting and later call raises it.

All methods belong to one event loop; `sync_link` is the bridge for threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, DeadlineExceeded, HubError, HubUnreachable, from_dict
from atoll.net.connection import Connection
from atoll.net.flow_control import CreditWindow, ReadGate, peer_lost
from atoll.net.handshake import greet, is_final, refusal
from atoll.net.listeners import Listeners
from atoll.net.pending_requests import PendingRequests
from atoll.net.retry import backoff
from atoll.net.transport import ConnectionLost, Dial, LinkCounters
from atoll.wire.frames import Buffer, Frame, Kind, decode_relay, encode_relay
from atoll.wire.limits import DEAD_AFTER_S
from atoll.wire.messages import (
    Credit,
    Failure,
    Hello,
    Message,
    Undeliverable,
    Welcome,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

Parts = tuple[Buffer, Buffer]
"""Head and piece of a relayed chunk, as `pack_chunk` returns them."""


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
        """Prepare a link; `start` opens it.

        `stats` returns the values of a heartbeat and must be fast; `retry` yields the waits between
        attempts to reconnect; a hub that is silent for `dead_after_s` ends a connection.
        """
        self._dial = dial
        self._hello = hello
        self._clock = clock or RealClock()
        self._stats = stats or dict
        self._retry = retry
        self._dead_after_s = dead_after_s
        self._requests = PendingRequests()
        self._listeners = Listeners()
        self._credit = CreditWindow()
        self._read_gate = ReadGate()
        self._connection: Connection | None = None
        self._opened = 0
        self._task: asyncio.Task[None] | None = None
        self._ended: asyncio.Future[AtollError] | None = None
        self.counters = LinkCounters()
        self.welcome: Welcome | None = None
        self.failed: AtollError | None = None

    # ------------------------------------------------------------------------- properties

    @property
    def session(self) -> str:
        """The session's address."""
        return self._hello.session

    @property
    def incarnation(self) -> str:
        """Id that distinguishes this process from others at the same address."""
        return self._hello.incarnation

    @property
    def connected(self) -> bool:
        """Whether a connection is open now."""
        return self._connection is not None

    def owed_bytes(self, to: str) -> int:
        """Return the relayed bytes to `to` that the hub has not credited yet."""
        return self._credit.owed_bytes(to)

    def on_notice(self, handler: Callable[[Message], None]) -> None:
        """Call `handler` with every notice, in order; it must not block."""
        self._listeners.notices.append(handler)

    def on_relay(self, handler: Callable[[str, memoryview], None]) -> None:
        """Call `handler(source, payload)` with every relayed payload, its checksum verified."""
        self._listeners.relays.append(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` after each reconnect."""
        self._listeners.reconnects.append(handler)

    def on_failure(self, handler: Callable[[AtollError], None]) -> None:
        """Call `handler` once when the link fails or is closed."""
        self._listeners.failures.append(handler)

    def hold_reading(self) -> None:
        """Pause reading; see `ReadGate` for the exception."""
        self._read_gate.hold()

    def release_reading(self) -> None:
        """Resume reading."""
        self._read_gate.release()

    # -------------------------------------------------------------------- start and close

    async def start(self, *, timeout_s: float, patient: bool = False) -> Welcome:
        """Open the first connection; with `patient` keep trying while no hub answers.

        Raises:
            HubUnreachable: no hub answers; says why.
            AuthError: the hub rejects the token.
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
                            logger.warning("%s waits for the hub: %s", self.session, error)
                        last = error
                    await asyncio.sleep(wait_s)
        except TimeoutError:
            raise last or HubUnreachable(
                "the hub did not answer in time", given=f"{timeout_s:g} s"
            ) from None
        self._task = asyncio.create_task(self._run(connection), name=f"link {self.session}")
        return connection.welcome

    async def close(self, body: Message | None = None, *, timeout_s: float = 5.0) -> None:
        """Send a last request, if any, wait for its answer, and close.

        Raises:
            AtollError: the request was rejected, or not answered in time.
        """
        try:
            if body is not None and self.failed is None:
                await self.request(body, timeout_s=timeout_s)
        finally:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            connection = self._connection
            self._fail(HubError("this link to the hub is closed", given=self.session))
            if connection is not None:  # the task ended before it served this one
                await connection.close()

    async def wait_failed(self) -> AtollError:
        """Wait until the link has failed and return the error."""
        if self._ended is None:
            raise _not_started(self.session)
        return await asyncio.shield(self._ended)  # cancelling one waiter must not end the others

    # ---------------------------------------------------------------- requests and relays

    async def request(self, body: Message, *, timeout_s: float) -> Message:
        """Return the hub's answer; the request is repeated after each reconnect.

        Raises:
            DeadlineExceeded: no answer arrived within `timeout_s`.
            AtollError: the hub's error.
        """
        self._check()
        try:
            with self._requests.pending(body) as pending, self._read_gate.kept_open():
                async with asyncio.timeout(timeout_s):
                    await self._send_control(pending.frame)
                    return await pending.future
        except TimeoutError:
            raise self._late(f"{type(body).__name__} was not answered in time", timeout_s) from None

    async def notify(self, body: Message) -> None:
        """Send a notice; it is dropped while there is no connection."""
        self._check()
        await self._send_control(pack(body))

    async def relay(self, to: str, parts: Parts, *, deadline: float) -> int:
        """Send one chunk to session `to` and return the bytes sent, including the frame's header.

        Waits for credit and for the connection. A chunk in flight when a connection breaks is lost
        without an error; see `on_reconnect`.

        Raises:
            PeerLost: `to` is not connected to the hub.
            DeadlineExceeded: the monotonic time `deadline` passed.
        """
        return await self.relay_all(to, (parts,), deadline=deadline)

    async def relay_all(self, to: str, parts: Iterable[Parts], *, deadline: float) -> int:
        """Send many chunks in order, e.g. a whole packet; otherwise as `relay`."""
        self._check()
        losses = self._credit.losses(to)
        sent_bytes = 0
        timeout_s = deadline - self._clock.monotonic()
        try:
            with self._read_gate.kept_open():
                async with asyncio.timeout(timeout_s):
                    for head, piece in parts:
                        # With enough credit no wait raises, so a lost receiver is checked for here.
                        if self._credit.losses(to) != losses:
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
            number = await self._credit.acquire(to, len(frame))
            connection = self._connection
            if connection is None or connection.number != number:
                continue  # the credit was for a connection that has broken since
            # Sent even if the caller gives up meanwhile: the hub returns the credit only of frames
            # that it gets.
            sending = asyncio.ensure_future(connection.send(frame, kind=Kind.RELAY))
            try:
                return await asyncio.shield(sending)
            except ConnectionLost:
                self._disconnected(connection)

    async def _send_control(self, frame: bytes) -> None:
        """Send if connected; after a break the reader reconnects, and requests are repeated."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionLost):
                await self._connection.send(frame, kind=Kind.CONTROL)

    # ------------------------------------------------------------------------- connections

    async def _connect(self) -> Connection:
        """Connect, shake hands, and make this the current connection."""
        transport = await self._dial()
        try:
            welcome, sent, received = await greet(
                transport, self._hello, id=next(self._requests.ids)
            )
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
            ids=self._requests.ids,
        )
        self._credit.open(welcome.window_bytes, generation=self._opened)
        return self._connection

    def _disconnected(self, connection: Connection) -> None:
        """Drop a broken connection, if it is still the current one."""
        if self._connection is connection:
            self._connection = None
            self._credit.shut()

    async def _run(self, connection: Connection) -> None:
        """Serve connections in sequence until an error is final."""
        waits = self._retry()
        try:
            while True:
                since = self._clock.monotonic()
                error = await self._serve(connection)
                if self._clock.monotonic() - since > self._dead_after_s:
                    waits = self._retry()  # the connection was stable: restart the backoff
                connection = await self._reconnect(error, waits)
                await self._resume()
        except AtollError as error:
            logger.warning("%s: the link to the hub ended: %s", self.session, error)
            self._fail(error)
        except Exception as error:
            logger.exception("%s: the link to the hub failed", self.session)
            self._fail(HubError("the link to the hub failed", given=repr(error)))

    async def _serve(self, connection: Connection) -> AtollError:
        try:
            error = await connection.serve(
                self._dispatch,
                read_gate=self._read_gate,
                stats=self._stats,
                dead_after_s=self._dead_after_s,
            )
        finally:
            self._disconnected(connection)
        logger.info("%s: %s", self.session, error)
        return error

    async def _reconnect(self, error: AtollError, waits: Iterator[float]) -> Connection:
        """Return the next connection, without a time limit; raise a final error."""
        while not is_final(error):
            await asyncio.sleep(next(waits))
            try:
                return await self._connect()
            except AtollError as failure:
                logger.info("%s: still disconnected: %s", self.session, failure)
                error = failure
        raise refusal(error, session=self.session)

    async def _resume(self) -> None:
        """Repeat unanswered requests, then notify the listeners."""
        self.counters.reconnects += 1
        logger.info("%s: connected to the hub again", self.session)
        for frame in self._requests.frames():
            await self._send_control(frame)
        self._listeners.reconnected()

    def _dispatch(self, frame: Frame) -> None:
        if frame.kind is Kind.CONTROL:
            envelope = unpack(frame)
            if not (envelope.reply and envelope.id):
                self._on_notice(envelope.body)
            elif not self._requests.resolve(envelope) and self._connection is not None:
                self._connection.resolve(envelope.id)
            return
        relay = decode_relay(frame)
        self._listeners.relayed(relay.source, relay.payload)

    def _on_notice(self, body: Message) -> None:
        """Apply credit; pass all other notices to the listeners."""
        if isinstance(body, Credit):
            self._credit.release(body.to, body.nbytes, generation=self._opened)
            return
        if isinstance(body, Undeliverable):
            self._credit.receiver_lost(body.to)
        elif isinstance(body, Failure):
            logger.warning("%s: the hub says: %s", self.session, from_dict(body.error))
        self._listeners.noticed(body)

    def _check(self) -> None:
        if self.failed is not None:
            raise self.failed
        if self._task is None:
            raise _not_started(self.session)

    def _fail(self, error: AtollError) -> None:
        """End the link: every waiting call raises the error. Later errors are ignored."""
        self._connection = None
        if self.failed is not None:
            return
        self.failed = error
        self._credit.fail(error)
        self._requests.fail(error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(error)
        self._listeners.failed(error)

    def _late(self, what: str, timeout_s: float) -> DeadlineExceeded:
        """Return the error of a timeout, which says whether the hub was disconnected."""
        away = "" if self.connected else ", and the hub is not connected"
        return DeadlineExceeded(
            what,
            given=f"{timeout_s:.3g} s{away}",
            remedy="check that the hub runs and the network works" if away else None,
        )


def _not_started(session: str) -> HubError:
    return HubError("this link to the hub was not started", given=session)
