"""Inboxes of threads: relayed payloads, notices and reconnects, in order of arrival.

Memory is bounded: above a limit of unread bytes the link stops reading its socket. The rest waits
at the hub, at most one window per sender, and the senders wait for credit.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.errors import AtollError, DeadlineExceeded, HubError
from atoll.wire.limits import WINDOW_BYTES
from atoll.wire.messages import Message

logger = logging.getLogger(__name__)

LIMIT_BYTES = 2 * WINDOW_BYTES
"""Unread payload bytes above which a link stops reading."""


MAX_EARLY = 256
"""Arrivals kept for the first subscriber; many links never have one."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A payload from another session: a view of the received frame, checksum verified."""

    source: str
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The link reconnected: relayed frames that were in flight are lost."""

    number: int
    """Reconnects of this link so far."""


Arrival = Relayed | Reconnected | Message


class Inbox:
    """One subscription, made by `SyncLink.subscribe`; one thread at a time may read it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        sources: Collection[str] | None,
        notices: Collection[type[Message]],
        reconnects: bool,
        prefix: bytes = b"",
        most: int | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._most = most
        self._condition = threading.Condition(dispatcher.lock)
        self._arrivals: deque[Arrival] = deque()
        self._closed = False
        self.sources = sources
        self.prefix = prefix
        self.notices = tuple(notices)
        self.reconnects = reconnects

    def receive(self, *, deadline: float) -> Arrival:
        """Return the oldest unread arrival; wait for one until the monotonic `deadline`.

        Raises:
            DeadlineExceeded: nothing arrived.
            AtollError: nothing is unread and the link has failed or is closed.
        """
        clock = self._dispatcher.clock
        with self._condition:
            while True:
                if self._arrivals:
                    return self._pop()
                self._check()
                left_s = deadline - clock.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(
                        "no message arrived before the deadline",
                        expected=f"a message from {_names(self.sources)}",
                    )
                self._condition.wait(left_s)

    def receive_now(self) -> Arrival | None:
        """Return the oldest unread arrival, or None; raises as :meth:`receive` after a failure."""
        with self._condition:
            if self._arrivals:
                return self._pop()
            self._check()
            return None

    def close(self) -> None:
        """Unsubscribe and drop unread arrivals."""
        with self._condition:
            self._closed = True
            while self._arrivals:
                self._pop()
            self._condition.notify_all()
        self._dispatcher.forget(self)

    def __enter__(self) -> Inbox:
        """Return the inbox; leaving the block unsubscribes."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wants(self, source: str, payload: memoryview) -> bool:
        """Return whether the subscription covers this payload."""
        known = self.sources is None or source in self.sources
        return known and (not self.prefix or payload[: len(self.prefix)] == self.prefix)

    def put(self, arrival: Arrival) -> None:
        """Add an arrival. Called by the dispatcher with the lock held."""
        if not self._closed:
            self._arrivals.append(arrival)
            if isinstance(arrival, Relayed):
                self._dispatcher.unread_bytes += len(arrival.payload)
            if self._most is not None and len(self._arrivals) > self._most:
                self._pop()
            self._condition.notify()

    def wake(self) -> None:
        """Wake a waiting reader. Called by the dispatcher with the lock held."""
        self._condition.notify_all()

    def move_to(self, other: Inbox) -> None:
        """Move unread arrivals to another inbox, if it wants them. Called with the lock held."""
        while self._arrivals:
            arrival = self._pop()
            if isinstance(arrival, Relayed):
                wanted = other.wants(arrival.source, arrival.payload)
            elif isinstance(arrival, Reconnected):
                wanted = other.reconnects
            else:
                wanted = isinstance(arrival, other.notices)
            if wanted:
                other.put(arrival)

    def _pop(self) -> Arrival:
        arrival = self._arrivals.popleft()
        if isinstance(arrival, Relayed):
            self._dispatcher.consumed(len(arrival.payload))
        return arrival

    def _check(self) -> None:
        if self._dispatcher.failure is not None:
            raise self._dispatcher.failure
        if self._closed:
            raise HubError("this inbox is closed")


class Dispatcher:
    """Distributes a link's arrivals to inboxes, and pauses its reading when they are full."""

    def __init__(
        self,
        *,
        clock: Clock,
        hold: Callable[[], None],
        release: Callable[[], None],
        on_loop: Callable[[Callable[[], object]], None],
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """Create a dispatcher with an inbox for early arrivals.

        `hold` pauses the link's reading above `limit_bytes` unread bytes, `release` resumes it at
        half of them; both are called on the event loop, for which `on_loop` schedules functions.
        """
        self.clock = clock
        # One lock for all inboxes: readers are threads, and they share the count of unread bytes.
        self.lock = threading.Lock()
        self.unread_bytes = 0
        self.failure: AtollError | None = None
        self._hold = hold
        self._release = release
        self._on_loop = on_loop
        self._limit_bytes = limit_bytes
        self._held = False
        self._early: Inbox | None = Inbox(
            self, sources=None, notices=(Message,), reconnects=True, most=MAX_EARLY
        )
        self._inboxes: list[Inbox] = [self._early]

    def subscribe(
        self,
        *,
        sources: Collection[str] | None = None,
        notices: Collection[type[Message]] = (),
        reconnects: bool = False,
        prefix: bytes = b"",
    ) -> Inbox:
        """Return a new inbox; see `SyncLink.subscribe`.

        The first inbox also gets earlier arrivals, so that none is lost between connecting and
        subscribing.
        """
        inbox = Inbox(self, sources=sources, notices=notices, reconnects=reconnects, prefix=prefix)
        with self.lock:
            if self._early is not None:
                self._early.move_to(inbox)
                self._inboxes.remove(self._early)
                self._early = None
            self._inboxes = [*self._inboxes, inbox]
        return inbox

    def forget(self, inbox: Inbox) -> None:
        """Remove a closed inbox."""
        with self.lock:
            self._inboxes = [other for other in self._inboxes if other is not inbox]

    # The next four are called on the loop.

    def deliver(self, source: str, payload: memoryview) -> None:
        """Add a payload to every inbox that wants it."""
        with self.lock:
            wanted = [inbox for inbox in self._inboxes if inbox.wants(source, payload)]
            for inbox in wanted:
                inbox.put(Relayed(source, payload))
            full = self.unread_bytes > self._limit_bytes
            if full:
                self._held = True
        if full:
            self._hold()
        if not wanted:
            logger.debug("a payload of %s was dropped: it has no subscriber", source)

    def notify(self, notice: Message) -> None:
        """Add a notice to every inbox that wants its type."""
        with self.lock:
            for inbox in self._inboxes:
                if isinstance(notice, inbox.notices):
                    inbox.put(notice)

    def reconnected(self, number: int) -> None:
        """Add a `Reconnected` to every inbox that wants it."""
        with self.lock:
            for inbox in self._inboxes:
                if inbox.reconnects:
                    inbox.put(Reconnected(number))

    def fail(self, error: AtollError) -> None:
        """Raise the error in readers after their unread arrivals."""
        with self.lock:
            self.failure = self.failure or error
            for inbox in self._inboxes:
                inbox.wake()

    def consumed(self, nbytes: int) -> None:
        """Account bytes as read. Called by the reading thread with the lock held."""
        self.unread_bytes -= nbytes
        if self._held and self.unread_bytes <= self._limit_bytes // 2:
            self._on_loop(self._release_if_low)

    def _release_if_low(self) -> None:
        """Check again on the event loop, where no delivery can interleave."""
        with self.lock:
            low = self._held and self.unread_bytes <= self._limit_bytes // 2
            if low:
                self._held = False
        if low:
            self._release()


def _names(sources: Collection[str] | None) -> str:
    return "any session" if sources is None else ", ".join(sorted(sources)) or "the hub"
