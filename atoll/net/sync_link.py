"""The link for threads: blocking calls with deadlines.

The event loop runs on its own thread. A whole packet crosses to it in one hop (`relay_all`), and
arrivals are read from inboxes as views of the received frames.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any, TypeVar

from atoll.clock import RealClock
from atoll.errors import AtollError, HubError
from atoll.net.dispatcher import Dispatcher, Inbox
from atoll.net.endpoint import PLAIN, HubEndpoint
from atoll.net.event_loop import LoopThread
from atoll.net.link import Link, Parts
from atoll.net.outbox import CAPACITY, Outbox, SyncOutbox, keep_every_second
from atoll.net.transport import LinkCounters
from atoll.net.websocket import dial
from atoll.wire.messages import Hello, Message, Welcome


async def open_link(
    url: str,
    hello: Hello,
    *,
    endpoint: HubEndpoint = PLAIN,
    stats: Callable[[], dict[str, float]] | None = None,
    timeout_s: float = 20.0,
    patient: bool = False,
) -> Link:
    """Return a started link to the hub at `url`; raises as `Link.start` does."""
    dial_s = min(timeout_s, 10.0)
    link = Link(lambda: dial(url, endpoint=endpoint, timeout_s=dial_s), hello, stats=stats)
    await link.start(timeout_s=timeout_s, patient=patient)
    return link


T = TypeVar("T")

SLACK_S = 5.0
"""Added to the link's timeout, so that its own, more precise error comes first."""


class SyncLink:
    """A `Link` for threads. Call its methods from any thread but the event loop's."""

    def __init__(self, link: Link, loop: LoopThread) -> None:
        """Wrap a link just started on `loop`; this object owns both."""
        self._link = link
        self._loop = loop
        self._clock = RealClock()
        self._closing = False
        self._dispatcher = Dispatcher(
            clock=self._clock,
            hold=link.hold_reading,
            release=link.release_reading,
            on_loop=loop.call,
        )
        link.on_relay(self._dispatcher.deliver)
        link.on_notice(self._dispatcher.notify)
        link.on_reconnect(lambda: self._dispatcher.reconnected(link.counters.reconnects))
        link.on_failure(self._dispatcher.fail)

    # ------------------------------------------------------------------------- properties

    @property
    def session(self) -> str:
        """The session's address."""
        return self._link.session

    @property
    def incarnation(self) -> str:
        """Id that distinguishes this process from others at the same address."""
        return self._link.incarnation

    @property
    def counters(self) -> LinkCounters:
        """Bytes in both directions, and reconnects."""
        return self._link.counters

    @property
    def connected(self) -> bool:
        """Whether a connection is open now."""
        return self._link.connected

    @property
    def failed(self) -> AtollError | None:
        """Why the link failed; None: it has not."""
        return self._link.failed

    @property
    def welcome(self) -> Welcome | None:
        """The hub's last Welcome."""
        return self._link.welcome

    # ---------------------------------------------------------------- requests and relays

    def request(self, body: Message, *, timeout_s: float) -> Message:
        """See :meth:`Link.request`."""
        return self._loop.run(
            self._link.request(body, timeout_s=timeout_s), timeout_s=timeout_s + SLACK_S
        )

    def request_later(
        self, body: Message, *, timeout_s: float
    ) -> concurrent.futures.Future[Message]:
        """Send a request and return the future of its answer; see :meth:`Link.request`.

        Cancelling the future withdraws the request: it is not repeated after a reconnect.
        """
        return self._loop.submit(self._link.request(body, timeout_s=timeout_s))

    def notify(self, body: Message) -> None:
        """Send a notice, best effort; returns at once. Raises AtollError if the link has failed."""
        if self._link.failed is not None:
            raise self._link.failed
        self._loop.submit(self._link.notify(body))

    def relay(self, to: str, parts: Parts, *, deadline: float) -> int:
        """See :meth:`Link.relay`."""
        return self.relay_all(to, (parts,), deadline=deadline)

    def relay_all(self, to: str, parts: Iterable[Parts], *, deadline: float) -> int:
        """See :meth:`Link.relay_all`.

        `parts` is iterated on the event loop: it should yield views and not compute.
        """
        left_s = max(0.0, deadline - self._clock.monotonic())
        return self._loop.run(
            self._link.relay_all(to, parts, deadline=deadline), timeout_s=left_s + SLACK_S
        )

    def relay_later(
        self, to: str, parts: Iterable[Parts], *, deadline: float
    ) -> concurrent.futures.Future[int]:
        """Send many chunks in the background; return the future of the bytes sent."""
        return self._loop.submit(self._link.relay_all(to, parts, deadline=deadline))

    # ---------------------------------------------------------------------- subscriptions

    def subscribe(
        self,
        *,
        sources: Collection[str] | None = None,
        notices: Collection[type[Message]] = (),
        reconnects: bool = False,
        prefix: bytes = b"",
    ) -> Inbox:
        """Return an inbox for later arrivals; subscribe before sending the request for them.

        The first inbox of a link also gets earlier arrivals.

        Args:
            sources: Sessions of the payloads; None: all, empty: none.
            notices: Types of notices.
            reconnects: Whether to add a `Reconnected` after each break.
            prefix: First bytes of the payloads; empty: all.
        """
        return self._dispatcher.subscribe(
            sources=sources, notices=notices, reconnects=reconnects, prefix=prefix
        )

    def on_notice(self, handler: Callable[[Message], None]) -> None:
        """Call `handler` with every notice on the event loop; it must not block."""
        self._link.on_notice(handler)

    def on_reconnect(self, handler: Callable[[], None]) -> None:
        """Call `handler` after each reconnect on the event loop; it must not block."""
        self._link.on_reconnect(handler)

    def outbox(
        self,
        make_message: Callable[[int, list[T]], Message],
        *,
        capacity: int = CAPACITY,
        thin: Callable[[list[T]], list[T]] = keep_every_second,
    ) -> SyncOutbox[T]:
        """Return a started outbox; see `Outbox`."""
        outbox = Outbox(self._link, make_message, capacity=capacity, thin=thin)
        self._loop.run(_start(outbox), timeout_s=SLACK_S)
        return SyncOutbox(outbox, self._loop)

    # ---------------------------------------------------------------------------- closing

    def close(self, body: Message | None = None, *, timeout_s: float = 5.0) -> None:
        """Send a last request, if any, then close; raises as :meth:`Link.close`. Idempotent."""
        closing, self._closing = self._closing, True
        if closing or not self._loop.running:
            return
        try:
            self._loop.run(
                self._link.close(body, timeout_s=timeout_s), timeout_s=timeout_s + SLACK_S
            )
        finally:
            self._dispatcher.fail(HubError("this link to the hub is closed", given=self.session))
            self._loop.stop()

    def __enter__(self) -> SyncLink:
        """Return the link; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


async def _wrap(opening: Coroutine[Any, Any, Link], loop: LoopThread) -> SyncLink:
    """Open the link and subscribe before its first frame is read."""
    return SyncLink(await opening, loop)


async def _start(outbox: Outbox[T]) -> None:
    outbox.start()


def connect(
    url: str,
    hello: Hello,
    *,
    endpoint: HubEndpoint = PLAIN,
    stats: Callable[[], dict[str, float]] | None = None,
    timeout_s: float = 20.0,
    patient: bool = False,
) -> SyncLink:
    """Open a session with the hub at ``http://HOST:PORT``; raises as :meth:`Link.start`.

    Args:
        url: The hub.
        hello: Names the session and authenticates this process; see `make_hello`.
        endpoint: How to reach the hub.
        stats: Returns the values of a heartbeat; called on the event loop.
        timeout_s: Time limit of the first connection.
        patient: Keep trying while no hub answers.
    """
    loop = LoopThread(name=f"atoll-link {hello.session}")
    loop.start()
    try:
        opening = open_link(
            url, hello, endpoint=endpoint, stats=stats, timeout_s=timeout_s, patient=patient
        )
        return loop.run(_wrap(opening, loop), timeout_s=timeout_s + SLACK_S)
    except BaseException:
        loop.stop()
        raise
