"""A queue in memory, for tests and simulation; the same promises as on disk but durability."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.clock import Clock
from atoll.hub.queue import (
    DONE_KEPT_S,
    MAX_ATTEMPTS,
    MAX_CLAIM,
    MAX_CLAIM_BYTES,
    DeadLetter,
    Depth,
    Waiters,
    check_lease_time,
    check_put,
    lease_lost,
    lease_seq,
    new_lease,
)
from atoll.wire.messages import QueueItem, QueuePutDone


@dataclass(slots=True)
class _Item:
    """One item; `lease` keeps its last value after the lease ended."""

    seq: int
    queue: str
    key: str
    payload: bytes
    state: str = "ready"
    attempt: int = 0
    lease: str = ""
    request: str = ""
    until: float = 0.0
    reason: str = ""

    def handed_out(self) -> QueueItem:
        return QueueItem(self.seq, self.key, self.payload, self.attempt, self.lease)


class MemoryQueue:
    """Named queues in one dictionary; see `atoll.hub.queue.Queue` for the promises."""

    def __init__(self, *, clock: Clock, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._clock = clock
        self._max_attempts = max_attempts
        self._items: dict[int, _Item] = {}
        self._keys: dict[tuple[str, str], int] = {}
        self._next = 1
        self._waiters = Waiters()

    async def put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item once per key."""
        check_put(queue, key)
        known = self._keys.get((queue, key))
        if known is not None:
            return QueuePutDone(known, duplicate=True)
        item = _Item(self._next, queue, key, bytes(payload))
        self._next += 1
        self._items[item.seq] = item
        self._keys[queue, key] = item.seq
        self._waiters.wake(queue)
        return QueuePutDone(item.seq, duplicate=False)

    async def claim(
        self,
        queue: str,
        *,
        lease_s: float,
        limit: int = 1,
        wait_s: float = 0.0,
        request: str = "",
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        check_lease_time(lease_s)
        limit = max(1, min(limit, MAX_CLAIM))

        async def attempt() -> list[QueueItem]:
            return self._claim(queue, lease_s, limit, request)

        return await self._waiters.until_some(queue, attempt, limit=limit, wait_s=wait_s)

    def _claim(self, queue: str, lease_s: float, limit: int, request: str) -> list[QueueItem]:
        self._expire()
        own = [item for item in self._items.values() if item.queue == queue]
        if request:
            again = [i for i in own if i.state == "leased" and i.request == request]
            if again:
                return [item.handed_out() for item in again]
        taken: list[QueueItem] = []
        nbytes = 0
        for item in own:
            if item.state != "ready":
                continue
            nbytes += len(item.payload)
            if len(taken) == limit or (taken and nbytes > MAX_CLAIM_BYTES):
                break
            item.state, item.request = "leased", request
            item.attempt += 1
            item.lease = new_lease(item.seq)
            item.until = self._clock.wall() + lease_s
            taken.append(item.handed_out())
        return taken

    async def ack(self, queue: str, *, lease: str) -> None:
        """Make a leased item done."""
        item = self._find(queue, lease)
        if item.state != "done":
            item.state, item.payload, item.until = "done", b"", self._clock.wall()

    async def extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end later."""
        check_lease_time(lease_s)
        self._expire()
        item = self._find(queue, lease)
        if item.state != "leased":
            raise lease_lost(queue, lease)
        item.until = self._clock.wall() + lease_s

    async def release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give an item back."""
        item = self._find(queue, lease)
        if item.state == "leased":
            self._give_back(item, reason)

    async def expire(self) -> int:
        """Take back items whose lease ended."""
        return self._expire()

    async def depths(self) -> dict[str, Depth]:
        """Return how full each queue is."""
        counts: dict[str, dict[str, int]] = {}
        for item in self._items.values():
            if item.state != "done":
                of_queue = counts.setdefault(item.queue, {})
                of_queue[item.state] = of_queue.get(item.state, 0) + 1
        return {queue: Depth(**states) for queue, states in counts.items()}

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return items that were given back too often."""
        dead = [i for i in self._items.values() if i.queue == queue and i.state == "dead"]
        return [DeadLetter(i.seq, i.key, i.payload, i.attempt, i.reason) for i in dead[:limit]]

    def _find(self, queue: str, lease: str) -> _Item:
        item = self._items.get(lease_seq(lease))
        if item is None or item.queue != queue or item.lease != lease:
            raise lease_lost(queue, lease)
        return item

    def _give_back(self, item: _Item, reason: str) -> None:
        item.state = "dead" if item.attempt >= self._max_attempts else "ready"
        item.reason = reason[:1000]
        if item.state == "ready":
            self._waiters.wake(item.queue)

    def _expire(self) -> int:
        now = self._clock.wall()
        ended = [i for i in self._items.values() if i.state == "leased" and i.until <= now]
        for item in ended:
            self._give_back(item, "the lease ended")
        for item in list(self._items.values()):
            if item.state == "done" and item.until <= now - DONE_KEPT_S:
                del self._items[item.seq], self._keys[item.queue, item.key]
        return len(ended)
