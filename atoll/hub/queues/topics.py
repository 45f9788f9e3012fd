"""Topics: durable logs that each subscription reads independently.

A topic is stored as a queue without claims: items stay until limits on number, bytes or age drop
them. The acknowledged position of a subscription outlives its readers and the hub.
"""

from __future__ import annotations

import asyncio
from collections import Counter
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


class Topics:
    """Every topic of a hub; created by `Queues`, sharing its backends."""

    def __init__(self, queues: Queues, *, clock: Clock) -> None:
        self._queues = queues
        self._clock = clock
        self._positions: dict[str, dict[str, int]] = {}
        self._drops: Counter[str] = Counter()
        """Drops of topics since the position of the last dropped item was read."""
        self._subscribing = asyncio.Lock()

    def dropped(self, topic: str) -> None:
        """Record that a topic dropped items."""
        self._drops[topic] += 1

    def forget(self, prefix: str) -> None:
        """Forget removed topics with this prefix."""
        gone = [topic for topic in self._positions if topic.startswith(prefix)]
        for topic in gone:
            del self._positions[topic]
        for topic in [topic for topic in self._drops if topic.startswith(prefix)]:
            del self._drops[topic]

    async def publish(self, topic: str, entries: Sequence[QueueEntry]) -> QueuePutManyDone:
        """Append items in order, all or none; items with a known key are not stored again.

        Raises:
            QueueFull: the items alone exceed the limits of the topic.
            HubError: a name or payload is invalid, or this is a queue.
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
        """Return items after `after` or the subscription's position, whichever is later.

        The first read creates the subscription at `start`, with `limit` 0 nothing else. Waits up to
        `wait_s` for the first item.

        Raises:
            HubError: the name is invalid, this is a queue, or there are too many subscriptions.
        """
        check_name("subscription", subscription)
        positions = await self._open(topic)
        position = positions.get(subscription)
        if position is None:
            async with self._subscribing:  # of two first reads the first decides
                position = positions.get(subscription)
                if position is None:
                    position = await self._subscribe(topic, positions, subscription, start)
        place = max(after, position)
        if limit <= 0:
            return TopicItems([], position, await self._dropped(topic, positions) > place)
        number = min(limit, MAX_CLAIM)
        backend = self._queues.backend(topic)

        async def attempt() -> list[TopicItem]:
            return await backend.peek(topic, after=place, limit=number)

        items = await self._queues.wait_list.until_some(topic, attempt, limit=number, wait_s=wait_s)
        # Only now: while a read waits, items may come and be dropped again.
        missed = await self._dropped(topic, positions) > place
        if items and items[0].seq == place + 1:
            missed = False  # no gap; items dropped since then are in `items`
        return TopicItems(items, positions.get(subscription, position), missed)

    async def _dropped(self, topic: str, positions: dict[str, int]) -> int:
        """Return the number of the newest item that was dropped."""
        if drops := self._drops.get(topic):
            found = await self._queues.backend(topic).positions(topic)
            positions[DROPPED] = max(found.get(DROPPED, 0), positions.get(DROPPED, 0))
            if self._drops.get(topic) == drops:  # else another read is needed
                del self._drops[topic]
        return positions.get(DROPPED, 0)

    async def ack(self, topic: str, subscription: str, *, seq: int) -> None:
        """Acknowledge everything up to `seq`; raises HubError for an unknown subscription."""
        positions = await self._open(topic)
        position = positions.get(subscription)
        if position is None or subscription == DROPPED:
            raise HubError(
                "this topic has no such subscription",
                given=f"{subscription!r} of {topic!r}",
                expected="one that has read from it",
            )
        if seq > position:
            positions[subscription] = seq  # at once, so that an older one does not replace it
            try:
                await self._queues.backend(topic).set_position(topic, subscription, seq)
            except BaseException:  # not stored: a repeated request must store it
                if positions.get(subscription) == seq:
                    positions[subscription] = position
                raise

    async def _open(self, topic: str) -> dict[str, int]:
        """Return the positions of a topic's subscriptions; creates a new topic."""
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
            self._queues.state(topic).subscribers = len(positions.keys() - {DROPPED})
        return positions

    async def _subscribe(
        self, topic: str, positions: dict[str, int], name: str, start: Literal["new", "oldest"]
    ) -> int:
        if len(positions) > MAX_SUBSCRIPTIONS:
            raise HubError(
                "this topic has too many subscriptions",
                given=f"{name!r} of {topic!r}",
                expected=f"at most {MAX_SUBSCRIPTIONS}",
            )
        backend = self._queues.backend(topic)
        position = await backend.last(topic) if start == "new" else positions.get(DROPPED, 0)
        await backend.set_position(topic, name, position)
        positions[name] = position
        self._queues.state(topic).subscribers = len(positions.keys() - {DROPPED})
        return position
