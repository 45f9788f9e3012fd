"""Topics: a durable log that each subscription reads for itself.

A topic is stored as a queue without claims: what is ready stays until there are too many
items, too many bytes, or they are too old. Each named subscription has a position of its own, up to
which it has acknowledged; it outlives its readers and the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from atoll.clock import Clock
from atoll.errors import HubError
from atoll.hub.queues.backend import DROPPED, MAX_CLAIM
from atoll.hub.queues.validation import check_name, wrong_kind
from atoll.wire.messages import QueueEntry, QueueOptions, QueuePutManyDone, TopicItem, TopicItems

if TYPE_CHECKING:
    from atoll.hub.queues.queues import Queues

MAX_SUBSCRIPTIONS = 1_000
"""Names under which one topic may be read."""


class Topics:
    """Every topic of a hub; made by `Queues`, with whom it shares the backends."""

    def __init__(self, queues: Queues, *, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._positions: dict[str, dict[str, int]] = {}
        """Of subscriptions, by topic; filled at a topic's first use."""
        self._changed: set[str] = set()
        """Topics that have dropped items since the last read."""

    def dropped(self, topic: str) -> None:
        """Note that a topic has dropped items."""
        self._changed.add(topic)

    def forget(self, prefix: str) -> None:
        """Forget the topics whose name begins so: they were removed."""
        gone = [topic for topic in self._positions if topic.startswith(prefix)]
        for topic in gone:
            del self._positions[topic]
        self._changed -= {topic for topic in self._changed if topic.startswith(prefix)}

    async def publish(self, topic: str, entries: Sequence[QueueEntry]) -> QueuePutManyDone:
        """Append items in order, all or none; a key that is known is accepted and kept once.

        Raises:
            QueueFull: the items alone are more than the topic keeps.
            HubError: a name or a payload cannot be used, or this is a queue.
        """
        await self._open(topic)
        return await self._queues.put_many(topic, entries)

    async def read(
        self,
        topic: str,
        subscription: str,
        *,
        after: int = 0,
        limit: int = 1,
        wait_s: float = 0.0,
        start: Literal["new", "oldest"] = "new",
    ) -> TopicItems:
        """Return items after a place, or after the subscription's position if that is later.

        Args:
            topic: Of which topic.
            subscription: For whom; the first read makes it.
            after: Number of the last item that was read already.
            limit: At most so many; 0: none, only make the subscription.
            wait_s: Longest wait for the first.
            start: Where a new subscription begins.

        Raises:
            HubError: the name cannot be used, this is a queue, or there are too many names.
        """
        check_name("subscription", subscription)
        positions = await self._open(topic)
        position = positions.get(subscription)
        if position is None:
            position = await self._subscribe(topic, subscription, start)
        place = max(after, position)
        if topic in self._changed:
            self._changed.discard(topic)
            found = await self._queues.backend(topic).positions(topic)
            positions[DROPPED] = found.get(DROPPED, 0)
        missed = positions.get(DROPPED, 0) > place
        if limit <= 0:
            return TopicItems([], position, missed)
        number = min(limit, MAX_CLAIM)
        backend = self._queues.backend(topic)

        async def attempt() -> list[TopicItem]:
            return await backend.peek(topic, after=place, limit=number)

        items = await self._queues.wait_list.until_some(topic, attempt, limit=number, wait_s=wait_s)
        return TopicItems(items, positions.get(subscription, position), missed)

    async def ack(self, topic: str, subscription: str, *, seq: int) -> None:
        """Say that a subscription is done with everything up to `seq`. Earlier ones: nothing.

        Raises:
            HubError: there is no such subscription.
        """
        positions = await self._open(topic)
        position = positions.get(subscription)
        if position is None or subscription == DROPPED:
            raise HubError(
                "this topic has no such subscription",
                given=f"{subscription!r} of {topic!r}",
                expected="one that has read from it",
            )
        if seq > position:
            positions[subscription] = seq
            await self._queues.backend(topic).set_position(topic, subscription, seq)

    async def _open(self, topic: str) -> dict[str, int]:
        """Return the positions of a topic's subscriptions; make the topic if it is new."""
        check_name("topic", topic)
        await self._queues.start()
        state = self._queues.state(topic)
        if not state.topic:
            if not state.idle:
                raise wrong_kind(topic, topic=False)
            await self._queues.declare(topic, QueueOptions(overflow="drop-oldest"), topic=True)
        positions = self._positions.get(topic)
        if positions is None:
            found = await self._queues.backend(topic).positions(topic)
            positions = self._positions.setdefault(topic, found)
            state.subscribers = len(positions.keys() - {DROPPED})
        return positions

    async def _subscribe(self, topic: str, name: str, start: Literal["new", "oldest"]) -> int:
        positions = self._positions[topic]
        if len(positions) > MAX_SUBSCRIPTIONS:
            raise HubError(
                "this topic has too many subscriptions",
                given=f"{name!r} of {topic!r}",
                expected=f"at most {MAX_SUBSCRIPTIONS}",
            )
        backend = self._queues.backend(topic)
        position = await backend.last(topic) if start == "new" else positions.get(DROPPED, 0)
        await backend.set_position(topic, name, position)
        positions.setdefault(name, position)
        self._queues.state(topic).subscribers = len(positions.keys() - {DROPPED})
        return positions[name]
