"""A durable topic for programs: publish, and read with independent subscriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from atoll.clock import Clock
from atoll.errors import DeadlineExceeded
from atoll.queues.channel import Channel
from atoll.queues.outbox import Outbox
from atoll.queues.queue import ASK_S, LONGEST_WAIT_S, PUT_S, Put, entry_of, fetch
from atoll.wire.messages import (
    QueueOpen,
    QueueOptions,
    TopicAck,
    TopicItem,
    TopicItems,
    TopicPublish,
    TopicRead,
)

Start = Literal["new", "oldest"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a topic."""

    seq: int
    key: str
    time: float
    """When it was published, seconds since 1970 by the hub's clock."""
    _channel: Channel = field(repr=False)
    _payload: bytes = field(repr=False)
    _blob: str = field(repr=False)

    @property
    def value(self) -> Any:
        """The value; a large one is fetched at every access."""
        return fetch(self._channel, self._payload, self._blob)


class Topic:
    """A named topic, made by `run.topic`; any thread may publish."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        *,
        clock: Clock,
        reader: str,
        options: QueueOptions | None = None,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open the topic and set its options, if any are given.

        Args:
            name: Its full name at the hub.
            channel: How it is reached.
            clock: Source of time for deadlines.
            reader: Default name of a subscription.
            options: How much it keeps (max_items, max_bytes, keep_s); None: unchanged.
            stopping: Checked while waiting for items; True ends the wait.

        Raises:
            ConfigError: the options are invalid.
            AuthError: this process may not use it.
        """
        self.name = name
        self._channel = channel
        self._clock = clock
        self._reader = reader
        self._stopping = stopping
        if options is not None:
            self.set_options(options)
        self._outbox = Outbox(
            channel, lambda entries, wait_s: TopicPublish(name, entries), clock=clock
        )

    def set_options(self, options: QueueOptions) -> None:
        """Set how much it keeps; raises as the constructor does."""
        self._channel.ask(QueueOpen(self.name, options, topic=True), timeout_s=ASK_S)

    def publish(self, value: Any, *, key: str = "", timeout_s: float = PUT_S) -> int:
        """Append a value durably; return its number. Arguments and errors as in `Queue.put`."""
        published = self.publish_later(value, key=key, timeout_s=timeout_s)
        try:
            return published.result(timeout_s + ASK_S)
        except TimeoutError:
            if published.done():
                raise
            raise DeadlineExceeded("it was not answered in time", given=self.name) from None

    def publish_later(self, value: Any, *, key: str = "", timeout_s: float = PUT_S) -> Put:
        """Append a value in the background."""
        entry = entry_of(self._channel, value, key)
        return self._outbox.add(entry, deadline=self._clock.monotonic() + timeout_s)

    def flush(self, *, timeout_s: float = PUT_S) -> bool:
        """Wait until everything published is acknowledged; return whether that was in time."""
        return self._outbox.flush(deadline=self._clock.monotonic() + timeout_s)

    def subscribe(self, name: str = "", *, start: Start = "new") -> Subscription:
        """Return a reader whose position is stored at the hub.

        Args:
            name: Of the subscription, which continues after its last acknowledged item. Empty: this
                member's name.
            start: Where a new subscription begins: at the `oldest` stored item, or with items that
                are `new` from now on.
        """
        return Subscription(
            self.name, self._channel, clock=self._clock, subscription=name or self._reader,
            start=start, stopping=self._stopping,
        )  # fmt: skip


class Subscription:
    """A reader of a topic; for one thread at a time."""

    def __init__(
        self,
        topic: str,
        channel: Channel,
        *,
        clock: Clock,
        subscription: str,
        start: Start,
        stopping: Callable[[], bool],
    ) -> None:
        """Create the subscription at the hub, or continue it."""
        self.topic = topic
        self.name = subscription
        self.missed = False
        """Whether the topic has dropped items that this subscription had not read."""
        self._channel = channel
        self._clock = clock
        self._start: Start = start
        self._stopping = stopping
        self._after = 0
        self._after = self._ask(limit=0, wait_s=0.0).position

    def read(self, limit: int = 1, *, wait_s: float = 0.0) -> list[Entry]:
        """Return the next items without acknowledging them.

        Args:
            limit: Largest number of items.
            wait_s: Longest wait for the first one.
        """
        deadline = self._clock.monotonic() + wait_s
        while True:
            left_s = max(0.0, min(deadline - self._clock.monotonic(), LONGEST_WAIT_S))
            answer = self._ask(limit=limit, wait_s=left_s)
            if answer.items:
                self._after = answer.items[-1].seq
            late = self._clock.monotonic() >= deadline
            if answer.items or late or self._stopping():
                return [self._entry(item) for item in answer.items]

    def newest(self, *, wait_s: float = 0.0) -> Entry | None:
        """Skip to the newest item and return it; None if nothing unread arrives in time."""
        found = self.read(1_000, wait_s=wait_s)
        while more := self.read(1_000) if found else []:
            found = more
        return found[-1] if found else None

    def __iter__(self) -> Iterator[Entry]:
        """Yield items one by one until the run is asked to stop; the caller acknowledges them."""
        while not self._stopping():
            yield from self.read(100, wait_s=LONGEST_WAIT_S)

    def ack(self, entry: Entry) -> None:
        """Acknowledge all items up to this one: the next reader starts after it."""
        self._channel.ask(TopicAck(self.topic, self.name, entry.seq), timeout_s=ASK_S)

    def _ask(self, *, limit: int, wait_s: float) -> TopicItems:
        ask = TopicRead(self.topic, self.name, self._after, limit, wait_s, self._start)
        answer = self._channel.ask(ask, timeout_s=wait_s + ASK_S)
        if not isinstance(answer, TopicItems):
            return TopicItems([])
        self.missed = self.missed or answer.missed
        return answer

    def _entry(self, item: TopicItem) -> Entry:
        return Entry(item.seq, item.key, item.time, self._channel, item.payload, item.blob)
