"""The durable queues: put once, lease, acknowledge; nothing acknowledged is lost.

An item is *ready*, *leased*, *done* or *dead*. A claim leases ready items in the order in which
they were put; an acknowledgement makes them done for good. A lease that ends without one gives the
item back, and an item given back too often becomes a dead letter, which nobody gets until a person
puts it back or discards it. Keys are remembered for a while after the item is done, so a put that
is sent again is accepted and stored once.

`Queues` holds many named queues over a backend that stores them. What a backend need not know is
here: how much a queue may hold and what happens then, who waits for an item or for room, and how
fast items come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from atoll.clock import Clock
from atoll.hub.queues.backend import (
    INTERNAL,
    MAX_CLAIM,
    MAX_DEAD,
    NOTHING,
    Amount,
    Backend,
    DeadLetter,
    HeldBlobs,
    Move,
    Stored,
    lease_lost,
    need_of,
)
from atoll.hub.queues.state import MAX_WAIT_S, QueueDepth, QueueState, WaitList
from atoll.hub.queues.topics import Topics
from atoll.hub.queues.validation import (
    check_entries,
    check_lease_time,
    check_name,
    check_options,
    sized,
    wrong_kind,
)
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, QueuePutDone, QueuePutManyDone

__all__ = ["DeadLetter", "QueueDepth", "Queues"]

UNLIMITED = QueueOptions(max_items=0, max_bytes=0)
"""Options of the hub's own queues: commands to machines are never refused."""

DEFAULT = QueueOptions()


class Queues:
    """Every queue of a hub.

    Args:
        backend: Where users' items are.
        clock: Whence rates and ages are told.
        internal: Where the hub's own queues (`node/...`) are; None: in the same backend.
        blobs: Where large payloads are; None: none are accepted.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        internal: Backend | None = None,
        blobs: HeldBlobs | None = None,
    ) -> None:
        self._users = backend
        self._internal = internal or backend
        self._blobs = blobs
        self._clock = clock
        self.waiters = WaitList()
        self._lanes: dict[str, QueueState] = {}
        self._opening: asyncio.Lock | None = None
        self._open = False
        self.topics = Topics(self, clock=clock)
        """The topics beside the queues."""
        for one in self._backends:
            one.moved = self._apply
            one.attempts = self._attempts

    @property
    def _backends(self) -> list[Backend]:
        return list(dict.fromkeys((self._internal, self._users)))

    async def start(self) -> None:
        """Learn what the backends hold; called by the first use, too.

        Raises:
            HubError: a backend cannot be used; says why.
        """
        if self._open:
            return
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._open:
                return
            for backend in self._backends:
                loaded = await backend.load()
                for queue, options in loaded.options.items():
                    lane = self.lane(queue)
                    lane.options, lane.declared = options, True
                    lane.topic = queue in loaded.topics
                for queue, states in loaded.amounts.items():
                    for state, amount in states.items():
                        self.lane(queue).load(state, amount)
            self._open = True

    async def close(self) -> None:
        """Finish what was begun."""
        for backend in self._backends:
            await backend.close()

    def reopen(self) -> None:
        """Forget who waits: they were of another life of the hub."""
        self.waiters, self._opening = WaitList(), None

    # -------------------------------------------------------------------------- producing

    async def declare(self, queue: str, options: QueueOptions, *, topic: bool = False) -> None:
        """Give a queue or topic these options from now on; what it holds already stays.

        Raises:
            ConfigError: they make no sense.
            HubError: a queue has this name and a topic was meant, or the other way round.
        """
        check_name("queue", queue)
        check_options(options)
        await self.start()
        lane = self.lane(queue)
        if lane.topic != topic and not lane.idle:
            raise wrong_kind(queue, topic=lane.topic)
        if not lane.declared or lane.options != options:
            lane.topic = topic
            await self.backend(queue).set_options(queue, options, topic=topic)
            lane.options, lane.declared = options, True
            lane.admit()

    async def put(
        self, queue: str, *, key: str, payload: bytes, blob: str = "", wait_s: float = 0.0
    ) -> QueuePutDone:
        """Store an item; see `put_many`."""
        entry = QueueEntry(key, payload, blob)
        done = await self.put_many(queue, [entry], wait_s=wait_s)
        return QueuePutDone(done.seqs[0], bool(done.duplicates), done.waited_s)

    async def put_many(
        self, queue: str, entries: Sequence[QueueEntry], *, wait_s: float = 0.0
    ) -> QueuePutManyDone:
        """Store items in order, all or none. A key that is known is accepted and stored once.

        Args:
            queue: Where to.
            entries: What.
            wait_s: Longest wait for room, where the queue's overflow is `wait`.

        Raises:
            QueueFull: there is no room for them.
            HubError: a name or a payload cannot be used, or a blob is not there.
        """
        stored = self.put_now(queue, entries)
        if stored is not None:
            done = await asyncio.shield(stored)
            return QueuePutManyDone(done.seqs, done.duplicates)
        await self.start()
        entries = sized(entries, self._blobs)
        backend, lane = self.backend(queue), self.lane(queue)
        need, drop, waited_s = need_of(entries), NOTHING, 0.0
        if not lane.reserve(need):
            keys = [entry.key for entry in entries]
            known = await backend.known(queue, keys)
            if all(key in known for key in keys):  # sent again: they take no room
                return QueuePutManyDone([known[key] for key in keys], list(range(len(keys))))
            if lane.topic or lane.options.overflow == "drop-oldest":
                drop = lane.reserve_by_dropping(need)
            else:
                waits = lane.options.overflow == "wait"
                began = self._clock.monotonic()
                await lane.wait(need, wait_s=min(wait_s, MAX_WAIT_S) if waits else 0.0)
                waited_s = self._clock.monotonic() - began
        # Shielded: what was begun is counted, whether or not its producer still listens.
        done = await asyncio.shield(self._store(backend, lane, entries, need, drop))
        return QueuePutManyDone(done.seqs, done.duplicates, waited_s)

    def put_now(self, queue: str, entries: Sequence[QueueEntry]) -> asyncio.Future[Stored] | None:
        """Begin to store items if there is room for them at this moment; else return None.

        The common case without a task of its own: who calls it may go on and hear later. Raises
        as `put_many` does.
        """
        check_name("queue", queue)
        check_entries(entries)
        if not self._open:
            return None
        entries = sized(entries, self._blobs)
        lane, need = self.lane(queue), need_of(entries)
        if not lane.reserve(need):
            return None
        return self._store(self.backend(queue), lane, entries, need, NOTHING)

    def _store(
        self,
        backend: Backend,
        lane: QueueState,
        entries: Sequence[QueueEntry],
        need: Amount,
        drop: Amount,
    ) -> asyncio.Future[Stored]:
        stored = asyncio.ensure_future(backend.put(lane.queue, entries, drop=drop))

        def settled(_: object) -> None:
            lane.free(need)
            lane.admit()

        stored.add_done_callback(settled)
        return stored

    # -------------------------------------------------------------------------- consuming

    async def claim(
        self,
        queue: str,
        *,
        lease_s: float,
        limit: int = 1,
        wait_s: float = 0.0,
        request: str = "",
    ) -> list[QueueItem]:
        """Lease up to `limit` ready items, oldest first; wait up to `wait_s` for the first.

        A claim asked again under the same `request` gets the leases of the first time, so an
        answer that was lost on the way costs nothing.
        """
        check_lease_time(lease_s)
        await self.start()
        limit = max(1, min(limit, MAX_CLAIM))
        backend = self.backend(queue)
        if queue in self._lanes and self._lanes[queue].topic:
            raise wrong_kind(queue, topic=True)
        first = True

        async def attempt() -> list[QueueItem]:
            nonlocal first
            lane = self._lanes.get(queue)
            if not first and (lane is None or not lane.ready):
                return []  # woken, but somebody was quicker
            first = False
            return await backend.claim(queue, lease_s=lease_s, limit=limit, request=request)

        return await self.waiters.until_some(queue, attempt, limit=limit, wait_s=wait_s)

    async def ack(self, queue: str, *, lease: str) -> None:
        """Make a leased item done. Again: nothing happens.

        Raises:
            HubError: somebody else holds the item by now, or there never was such a lease.
        """
        if await self.ack_many(queue, [lease]):
            raise lease_lost(queue, lease)

    async def ack_many(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Make leased items done; return the leases that were lost to somebody else."""
        await self.start()
        return await self.backend(queue).ack(queue, leases)

    async def extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end `lease_s` from now.

        Raises:
            HubError: the lease ended already.
        """
        if await self.extend_many(queue, [lease], lease_s=lease_s):
            raise lease_lost(queue, lease)

    async def extend_many(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Let leases end `lease_s` from now; return those that ended already."""
        check_lease_time(lease_s)
        await self.start()
        return await self.backend(queue).extend(queue, leases, lease_s=lease_s)

    async def release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give an item back. Again: nothing happens.

        Raises:
            HubError: somebody else holds the item by now, or there never was such a lease.
        """
        await self.start()
        if not await self.backend(queue).release(queue, lease, reason=reason[:1000]):
            raise lease_lost(queue, lease)

    # ---------------------------------------------------------------------- dead letters

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return items that were given back too often, oldest first."""
        await self.start()
        return await self.backend(queue).dead_letters(queue, limit=limit)

    async def requeue(self, queue: str, seqs: Sequence[int] | None = None) -> int:
        """Make dead letters ready again, as if never claimed (None: all); return how many."""
        await self.start()
        return await self.backend(queue).requeue(queue, seqs)

    async def discard(self, queue: str, seqs: Sequence[int] | None = None) -> int:
        """Give dead letters up for good (None: all); return how many."""
        await self.start()
        return await self.backend(queue).discard(queue, seqs)

    # -------------------------------------------------------------------------- house-keeping

    async def expire(self) -> int:
        """Take back items whose lease ended, drop what is too old; return how many came back."""
        await self.start()
        count = 0
        for backend in self._backends:
            count += await backend.expire()
        now = self._clock.wall()
        for lane in list(self._lanes.values()):
            if (over := lane.depth.dead - MAX_DEAD) > 0:
                letters = await self.dead_letters(lane.queue, limit=over)
                await self.discard(lane.queue, [letter.seq for letter in letters])
            if lane.idle and not lane.came.per_s(now=now) + lane.went.per_s(now=now):
                del self._lanes[lane.queue]
            if lane.options.keep_s > 0 and (lane.ready or lane.depth.dead):
                await self.backend(lane.queue).drop_older(lane.queue, now - lane.options.keep_s)
        return count

    async def depths(self) -> dict[str, QueueDepth]:
        """Return how full each queue is; queues whose items are all done are left out."""
        await self.start()
        return {
            lane.queue: lane.depth for lane in self._lanes.values() if lane.depth != QueueDepth()
        }

    async def rows(self) -> list[dict[str, Any]]:
        """Return what people want to know of each queue, by name; cheap, whatever is stored."""
        await self.start()
        oldest: dict[str, float] = {}
        for backend in self._backends:
            filled = [n for n, lane in self._lanes.items() if lane.ready]
            oldest |= await backend.oldest([n for n in filled if self.backend(n) is backend])
        now = self._clock.wall()
        return [
            lane.row(now=now, oldest=oldest.get(name), consumers=self.waiters.number(name))
            for name, lane in sorted(self._lanes.items())
        ]

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic whose name begins so, with all that it holds."""
        await self.start()
        await self.backend(prefix).remove(prefix)
        self._lanes = {q: lane for q, lane in self._lanes.items() if not q.startswith(prefix)}
        self.topics.forget(prefix)

    # --------------------------------------------------------------------------- inside

    def backend(self, queue: str) -> Backend:
        """Return where a queue is stored."""
        return self._internal if queue.startswith(INTERNAL) else self._users

    def lane(self, queue: str) -> QueueState:
        """Return what is known of a queue."""
        lane = self._lanes.get(queue)
        if lane is None:
            options = UNLIMITED if queue.startswith(INTERNAL) else DEFAULT
            lane = self._lanes[queue] = QueueState(queue, options)
        return lane

    def _attempts(self, queue: str) -> int:
        lane = self._lanes.get(queue)
        return (lane.options if lane else DEFAULT).max_attempts

    def _apply(self, moves: Sequence[Move]) -> None:
        """Book what the backend has made durable; wake whom it concerns."""
        now = self._clock.wall()
        for move in moves:
            lane = self.lane(move.queue)
            lane.apply(move, now=now)
            if move.target == "ready":
                if lane.topic:
                    self.waiters.wake_all(move.queue)
                else:
                    self.waiters.wake(move.queue, move.items)
            elif lane.topic:
                self.topics.dropped(move.queue)
            elif lane.waiting:
                lane.admit()
