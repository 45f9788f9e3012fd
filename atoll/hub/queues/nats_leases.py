"""Leases of queues in NATS: claims, acknowledgements, attempts and dead letters.

Public methods hold the lock of their queue unless stated otherwise. Where the server needs two
operations, their order is safe against a crash in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from atoll.clock import Clock
from atoll.hub.queues.backend import ItemState, Listener, Move, lease_seq
from atoll.hub.queues.nats_items import NatsItem, NatsQueue, QueueBlobs
from atoll.hub.queues.nats_records import NatsRecords
from atoll.hub.queues.nats_streams import ACK_WAIT_S, Delivery, NatsStreams, StoredMessage
from atoll.wire.messages import QueueItem

log = logging.getLogger(__name__)

PARKED_S = 10 * 365 * 86_400.0
"""How long the server withholds a dead letter: effectively forever."""

_LATE_TRIES = 20
_LATE_S = 0.01
"""How often and after what pause a fetch is repeated that found none of the items stored."""


class NatsLeases:
    """Changes leases in memory and on the server.

    `attempts` returns the claims after which an item becomes a dead letter; `moved` is called with
    every move once it is durable.
    """

    def __init__(
        self,
        streams: NatsStreams,
        records: NatsRecords,
        *,
        clock: Clock,
        blobs: QueueBlobs,
        attempts: Callable[[str], int],
        moved: Listener,
    ) -> None:
        self._streams = streams
        self._records = records
        self._clock = clock
        self._blobs = blobs
        self._attempts = attempts
        self._moved = moved

    async def claim(
        self, queue: NatsQueue, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items; a repeated request gets the same items."""
        async with queue.changing:
            await self.take_back(queue)
            if again := queue.of_request(request):
                messages = await self.messages(queue, again)
                return [
                    _leased(item, message.payload)
                    for item, message in zip(again, messages, strict=True)
                    if message is not None
                ]
            unsure, queue.unsure = queue.unsure, True  # until everything below has succeeded
            fetched = await self._fetch(queue, limit)
            items = [item for item, _ in fetched]
            if items and lease_s != ACK_WAIT_S:
                addresses = [item.address for item in items]
                await self._streams.withhold(queue.name, addresses, lease_s)
            for item in items:
                item.lease = queue.lease(item.seq, item.attempt, item.delivery)
                item.request, item.until = request, self._clock.wall() + lease_s
            self._move(queue, items, ItemState.LEASED)
            queue.unsure = unsure
            return sorted((_leased(*one) for one in fetched), key=lambda item: item.seq)

    async def _fetch(self, queue: NatsQueue, limit: int) -> list[tuple[NatsItem, bytes]]:
        fetched: list[tuple[NatsItem, bytes]] = []
        nbytes = tries = 0
        while len(fetched) < limit:
            wanted = limit - len(fetched)
            found = await self._streams.fetch(queue.name, limit=wanted, nbytes=nbytes)
            if not found:
                # The server confirms an item before its consumer can see it: on a busy machine
                # the first fetch after a put finds nothing, and a claim that waits would sleep on.
                tries += 1
                if fetched or tries > _LATE_TRIES or not queue.undelivered:
                    break
                await asyncio.sleep(_LATE_S)
                continue
            ready = [item for one in found if (item := await self._ready(queue, one)) is not None]
            payloads = {one.message.seq: one.message.payload for one in found}
            fetched += [(item, payloads[item.seq]) for item in ready]
            nbytes += sum(len(payloads[item.seq]) for item in ready)
            if len(ready) == len(found) and not queue.undelivered:
                break
        return fetched

    async def _ready(self, queue: NatsQueue, delivery: Delivery) -> NatsItem | None:
        """Return the delivered item, or correct the server and return None if it is not ready."""
        seq = delivery.message.seq
        if queue.is_done(seq):  # the server was killed before it stored the removal
            await self._streams.ack(queue.name, [(seq, delivery.number)])
            return None
        known = seq in queue.items
        item, was_leased = queue.deliver(delivery)
        if was_leased:
            self._report(queue, [item], ItemState.LEASED, ItemState.READY)
        if item.state != ItemState.READY:
            dead = item.state == ItemState.DEAD
            left_s = PARKED_S if dead else max(0.001, item.until - self._clock.wall())
            await self._streams.withhold(queue.name, [item.address], left_s)
            queue.bases[seq] = queue.bases.get(seq, 0) + 1  # does not count as an attempt
            return None
        item.attempt = queue.attempts_of(item)
        if not known and item.attempt > self._attempts(queue.name):
            item.attempt -= 1
            item.reason = "the lease ended"
            await self._bury(queue, [item])
            return None
        return item

    async def ack(self, queue: NatsQueue, leases: Sequence[str]) -> list[str]:
        """Mark leased items as done; return the lost leases."""
        async with queue.changing:
            lost = await self._lost(queue, leases)
            seqs = {lease_seq(lease) for lease in leases if lease not in lost}
            items = [queue.items[seq] for seq in seqs if seq in queue.items]
            await self.end(queue, items, ItemState.DONE)
        return lost

    async def _lost(self, queue: NatsQueue, leases: Sequence[str]) -> list[str]:
        """Return the lost leases; adopts items leased by a previous hub."""
        for lease in leases:
            if queue.knows(lease) is None:
                message = await self._streams.get(queue.name, lease_seq(lease))
                if message is not None:
                    queue.adopt(lease, message)
        return [lease for lease in leases if queue.knows(lease) is False]

    async def extend(self, queue: NatsQueue, leases: Sequence[str], lease_s: float) -> list[str]:
        """Extend leases; return the lost ones."""
        async with queue.changing:
            await self.take_back(queue)
            lost = set(await self._lost(queue, leases))
            held: dict[str, NatsItem] = {}
            for lease in leases:
                item = queue.items.get(lease_seq(lease))
                if lease not in lost and item is not None and item.state == ItemState.LEASED:
                    held[lease] = item
            addresses = [item.address for item in held.values()]
            await self._streams.withhold(queue.name, addresses, lease_s)
            for item in held.values():
                item.until = self._clock.wall() + lease_s
        return [lease for lease in leases if lease not in held]

    async def release(self, queue: NatsQueue, lease: str, reason: str) -> bool:
        """Return an item to the queue; False if the lease is lost."""
        async with queue.changing:
            if await self._lost(queue, [lease]):
                return False
            item = queue.items.get(lease_seq(lease))
            if item is not None and item.state == ItemState.LEASED:
                await self._give_back(queue, [item], reason)
            return True

    async def take_back(self, queue: NatsQueue) -> int:
        """Release items with ended leases; the caller holds `queue.changing`."""
        now = self._clock.wall()
        ended = [item for item in queue.of_state(ItemState.LEASED) if item.until <= now]
        await self._give_back(queue, ended, "the lease ended")
        return len(ended)

    async def _give_back(self, queue: NatsQueue, items: Sequence[NatsItem], reason: str) -> None:
        most = self._attempts(queue.name)
        for item in items:
            item.reason = reason
        back = [item for item in items if item.attempt < most]
        if back:
            await self._streams.withhold(queue.name, [item.address for item in back], 0)
            self._move(queue, back, ItemState.READY)
        await self._bury(queue, [item for item in items if item.attempt >= most])

    async def _bury(self, queue: NatsQueue, items: Sequence[NatsItem]) -> None:
        """Make items dead letters; the record first, because without it they would be lost."""
        for item in items:
            await self._records.store(queue.record(item, dead=True))
            item.recorded = True
            await self._streams.withhold(queue.name, [item.address], PARKED_S)
            self._move(queue, [item], ItemState.DEAD)
            log.warning(
                "item %r of queue %r is a dead letter: %s", item.key, queue.name, item.reason
            )

    async def requeue(self, queue: NatsQueue, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again."""
        async with queue.changing:
            dead = queue.of_state(ItemState.DEAD, seqs)
            for item in dead:
                # This order: after a crash in between the item is still a dead letter.
                await self._streams.withhold(queue.name, [item.address], 0)
                await self._records.store(queue.record(item, dead=False))
                queue.bases[item.seq] = item.deliveries
                item.attempt = 0
                self._move(queue, [item], ItemState.READY)
            return len(dead)

    async def discard(self, queue: NatsQueue, seqs: Sequence[int] | None) -> int:
        """Delete dead letters."""
        async with queue.changing:
            dead = queue.of_state(ItemState.DEAD, seqs)
            await self.end(queue, dead, ItemState.DROPPED)
            return len(dead)

    async def messages(
        self, queue: NatsQueue, items: Sequence[NatsItem]
    ) -> list[StoredMessage | None]:
        """Return the messages of items; forgets those that the server no longer has."""
        found = await asyncio.gather(*(self._streams.get(queue.name, item.seq) for item in items))
        gone = [item for item, message in zip(items, found, strict=True) if message is None]
        await self.end(queue, gone, ItemState.DROPPED)
        return found

    async def end(self, queue: NatsQueue, items: Sequence[NatsItem], end: ItemState) -> None:
        """Finish delivered items; the caller holds `queue.changing`."""
        if not items:
            return
        await self._streams.ack(queue.name, [item.address for item in items])
        for item in items:
            if item.recorded:
                await self._records.forget(queue.record(item, dead=False))
        await self._blobs.drop(queue.name, items)
        self._move(queue, items, end)
        for item in items:
            queue.finish(item)

    def _move(self, queue: NatsQueue, items: Sequence[NatsItem], target: ItemState) -> None:
        for source in (ItemState.READY, ItemState.LEASED, ItemState.DEAD):
            moving = [item for item in items if item.state == source]
            self._report(queue, moving, source, target)
        for item in items:
            item.state = target

    def _report(
        self, queue: NatsQueue, items: Sequence[NatsItem], source: ItemState, target: ItemState
    ) -> None:
        if items:
            total = sum(item.nbytes for item in items)
            self._moved([Move(queue.name, source, target, len(items), total)])


def _leased(item: NatsItem, payload: bytes) -> QueueItem:
    return QueueItem(item.seq, item.key, payload, item.attempt, item.lease, item.blob)
