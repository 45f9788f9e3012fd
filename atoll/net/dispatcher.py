"""Where a thread finds what came for it: relayed payloads, notices and reconnects, in order.

Memory is bounded: when more than the limit lies unread the link stops reading its socket, so the
hub keeps the rest (at most its window per sender) and the senders wait for credit.
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
"""Unread payload bytes of one link above which it stops reading."""


MAX_EARLY = 256
"""Arrivals that are kept for the first subscriber: many links never have one."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """A payload that another session relayed: a view into the received frame, checksum verified."""

    source: str
    payload: memoryview


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection broke and is back: relayed frames that were under way are lost."""

    number: int
    """Reconnects of this link so far."""


Arrival = Relayed | Reconnected | Message


class Inbox:
    """One subscription; made by `SyncLink.subscribe`. For one reading thread at a time."""

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
        """Make an inbox that keeps at most the newest `most` arrivals; None: all."""
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
        """Return what arrived first and was not read yet; waits until the monotonic `deadline`.

        Raises:
            DeadlineExceeded: nothing came.
            AtollError: nothing is left to read and the link has failed for good, or is closed.
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
                        "nothing came before the deadline",
                        expected=f"a message from {_names(self.sources)}",
                    )
                self._condition.wait(left_s)

    def receive_now(self) -> Arrival | None:
        """Return what arrived first and was not read yet, or None; does not wait.

        Raises:
            AtollError: nothing is left to read and the link has failed for good, or is closed.
        """
        with self._condition:
            if self._arrivals:
                return self._pop()
            self._check()
            return None

    def close(self) -> None:
        """Unsubscribe; what is unread is dropped."""
        with self._condition:
            self._closed = True
            while self._arrivals:
                self._pop()
            self._condition.notify_all()
        self._dispatcher.forget(self)

    def __enter__(self) -> Inbox:
        """Return itself; leaving the block unsubscribes."""
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def wants(self, source: str, payload: memoryview) -> bool:
        """Return whether a payload of this source belongs here."""
        known = self.sources is None or source in self.sources
        return known and (not self.prefix or payload[: len(self.prefix)] == self.prefix)

    def put(self, arrival: Arrival) -> None:
        """Store an arrival; the mailroom calls it with its lock held."""
        if not self._closed:
            self._arrivals.append(arrival)
            if isinstance(arrival, Relayed):
                self._dispatcher.unread_bytes += len(arrival.payload)
            if self._most is not None and len(self._arrivals) > self._most:
                self._pop()
            self._condition.notify()

    def wake(self) -> None:
        """Let a waiting reader look again; the mailroom calls it with its lock held."""
        self._condition.notify_all()

    def move_to(self, other: Inbox) -> None:
        """Give what is unread to another inbox, as far as it wants it; with the lock held."""
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
    """Sorts what a link receives into inboxes and holds the link back when they are full."""

    def __init__(
        self,
        *,
        clock: Clock,
        hold: Callable[[], None],
        release: Callable[[], None],
        on_loop: Callable[[Callable[[], object]], None],
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        """Make an empty mailroom.

        Args:
            clock: Source of time of the deadlines.
            hold: Stops the link's reading; called on the loop.
            release: Lets it read again; called on the loop.
            on_loop: Calls a function on the loop, from any thread.
            limit_bytes: Unread bytes above which reading stops; it goes on at half of them.
        """
        self.clock = clock
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

        The first one also gets what came before it, so that nothing is lost between connecting
        and subscribing.
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
        """Put a payload into every inbox that wants its source."""
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
            logger.debug("a payload of %s was dropped: nobody subscribed to it", source)

    def notify(self, notice: Message) -> None:
        """Put a notice into every inbox that wants its type."""
        with self.lock:
            for inbox in self._inboxes:
                if isinstance(notice, inbox.notices):
                    inbox.put(notice)

    def reconnected(self, number: int) -> None:
        """Put a reconnect into every inbox that wants to know."""
        with self.lock:
            for inbox in self._inboxes:
                if inbox.reconnects:
                    inbox.put(Reconnected(number))

    def fail(self, error: AtollError) -> None:
        """The link ended for good: readers get the error when they have read the rest."""
        with self.lock:
            self.failure = self.failure or error
            for inbox in self._inboxes:
                inbox.wake()

    def consumed(self, nbytes: int) -> None:
        """Book bytes as read; called with the lock held, by the reading thread."""
        self.unread_bytes -= nbytes
        if self._held and self.unread_bytes <= self._limit_bytes // 2:
            self._on_loop(self._release_if_low)

    def _release_if_low(self) -> None:
        """Look again on the loop, where nothing is delivered in between."""
        with self.lock:
            low = self._held and self.unread_bytes <= self._limit_bytes // 2
            if low:
                self._held = False
        if low:
            self._release()


def _names(sources: Collection[str] | None) -> str:
    return "any session" if sources is None else ", ".join(sorted(sources)) or "the hub"
