"""Durable queues: items are put once, leased and acknowledged; none that was stored is lost.

An item is *ready*, *leased*, *done* or *dead*. A claim leases ready items in put order; an
acknowledgement makes them done. A lease that ends without one returns the item, and an item
returned too often becomes a dead letter until an operator requeues or discards it. Keys are
remembered for a while after the item is done, so that a repeated put is stored once.
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
    ItemState,
    Move,
    Stored,
    lease_lost,
    need_of,
)
from atoll.hub.queues.quota import QueueRoom
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
from atoll.hub.quotas.ledger import Ledger
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, QueuePutDone, QueuePutManyDone

__all__ = ["DeadLetter", "QueueDepth", "Queues"]

UNLIMITED = QueueOptions(max_items=0, max_bytes=0)
"""Options of the hub's own queues: commands to nodes are never refused."""

DEFAULT = QueueOptions()


class Queues:
    """Every queue of a hub.

    The hub's own queues (`node/...`) are in `internal`, by default `backend`. Without `blobs` large
    payloads are refused.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        internal: Backend | None = None,
        blobs: HeldBlobs | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._users = backend
        self._internal = internal or backend
        self._blobs = blobs
        self._clock = clock
        self.wait_list = WaitList()
        self._states: dict[str, QueueState] = {}
        self.room = QueueRoom(ledger or Ledger(clock=clock))
        self._opening: asyncio.Lock | None = None
        self._open = False
        self.topics = Topics(self, clock=clock)
        for one in self._backends:
            one.moved = self._apply
            one.attempts = self._attempts

    @property
    def _backends(self) -> list[Backend]:
        return list(dict.fromkeys((self._internal, self._users)))

    async def start(self) -> None:
        """Load the backends (every operation does this first); raises HubError."""
        if self._open:
            return
        # Concurrent first uses must load the backends once.
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._open:
                return
            for backend in self._backends:
                loaded = await backend.load()
                for queue, options in loaded.options.items():
                    state = self.state(queue)
                    state.options, state.declared = options, True
                    state.topic = queue in loaded.topics
                for queue, states in loaded.amounts.items():
                    for name, amount in states.items():
                        self.state(queue).load(ItemState(name), amount)
            self._open = True

    async def close(self) -> None:
        """Finish running operations."""
        for backend in self._backends:
            await backend.close()

    def reopen(self) -> None:
        """Forget waiting claims, which belong to a previous event loop."""
        self.wait_list, self._opening = WaitList(), None

    # ---------------------------------------------------------------------------- producing

    async def declare(self, queue: str, options: QueueOptions, *, topic: bool = False) -> None:
        """Set the options of a queue or topic; existing items stay.

        Raises:
            ConfigError: the options are invalid.
            HubError: the name belongs to the other kind.
        """
        check_name("queue", queue)
        check_options(options)
        await self.start()
        state = self.state(queue)
        if state.topic != topic and not state.idle:
            raise wrong_kind(queue, topic=state.topic)
        if not state.declared or state.options != options:
            state.topic = topic
            await self.backend(queue).set_options(queue, options, topic=topic)
            state = self.state(queue)  # `expire` may have dropped the idle one during the write
            state.topic, state.options, state.declared = topic, options, True
            state.admit()

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
        """Store items in order, all or none; items with a known key are not stored again.

        `wait_s` limits the wait for space if the queue's overflow is `wait`.

        Raises:
            QueueFull: there is no space.
            HubError: a name or payload is invalid, or a blob does not exist.
        """
        stored = self.put_now(queue, entries)
        if stored is not None:
            done = await asyncio.shield(stored)
            return QueuePutManyDone(done.seqs, done.duplicates)
        await self.start()
        entries = sized(entries, self._blobs)
        backend, state = self.backend(queue), self.state(queue)
        need, drop, waited_s = need_of(entries), NOTHING, 0.0
        if not state.reserve(need):
            keys = [entry.key for entry in entries]
            known = await backend.known(queue, keys)
            if all(key in known for key in keys):  # repeated: they need no space
                return QueuePutManyDone([known[key] for key in keys], list(range(len(keys))))
            if state.topic or state.options.overflow == "drop-oldest":
                drop = state.reserve_by_dropping(need)
            else:
                waits = state.options.overflow == "wait"
                began = self._clock.monotonic()
                await state.wait(need, wait_s=min(wait_s, MAX_WAIT_S) if waits else 0.0)
                waited_s = self._clock.monotonic() - began
        # Shielded, so that items are counted even if the producer is cancelled.
        done = await asyncio.shield(self._store(backend, state, entries, need, drop))
        return QueuePutManyDone(done.seqs, done.duplicates, waited_s)

    def put_now(self, queue: str, entries: Sequence[QueueEntry]) -> asyncio.Future[Stored] | None:
        """Start storing items if there is space now, else return None; raises like `put_many`."""
        check_name("queue", queue)
        check_entries(entries)
        if not self._open:
            return None
        entries = sized(entries, self._blobs)
        state, need = self.state(queue), need_of(entries)
        if not state.reserve(need):
            return None
        return self._store(self.backend(queue), state, entries, need, NOTHING)

    def _store(
        self,
        backend: Backend,
        state: QueueState,
        entries: Sequence[QueueEntry],
        need: Amount,
        drop: Amount,
    ) -> asyncio.Future[Stored]:
        stored = asyncio.ensure_future(backend.put(state.queue, entries, drop=drop))

        def settled(_: object) -> None:
            state.free(need)
            state.freed()

        stored.add_done_callback(settled)
        return stored

    # ---------------------------------------------------------------------------- consuming

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

        Repeating a `request` returns the same leases, so a lost answer costs nothing.
        """
        check_lease_time(lease_s)
        await self.start()
        limit = max(1, min(limit, MAX_CLAIM))
        backend = self.backend(queue)
        if queue in self._states and self._states[queue].topic:
            raise wrong_kind(queue, topic=True)
        first = True

        async def attempt() -> list[QueueItem]:
            nonlocal first
            state = self._states.get(queue)
            if backend.capabilities.exact_counts:
                if state is None or not (state.ready or state.depth.leased):
                    return []  # nothing is there, not even for a repeated request: no transaction
                if not first and not state.ready:
                    return []  # another claim was faster
            first = False
            return await backend.claim(queue, lease_s=lease_s, limit=limit, request=request)

        return await self.wait_list.until_some(queue, attempt, limit=limit, wait_s=wait_s)

    async def ack(self, queue: str, *, lease: str) -> None:
        """Mark a leased item as done (idempotent); raises HubError if the lease is lost."""
        if await self.ack_many(queue, [lease]):
            raise lease_lost(queue, lease)

    async def ack_many(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Mark leased items as done; return the lost leases."""
        await self.start()
        return await self.backend(queue).ack(queue, leases)

    async def extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Extend a lease to `lease_s` from now; raises HubError if it is lost."""
        if await self.extend_many(queue, [lease], lease_s=lease_s):
            raise lease_lost(queue, lease)

    async def extend_many(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend leases to `lease_s` from now; return those that have ended."""
        check_lease_time(lease_s)
        await self.start()
        return await self.backend(queue).extend(queue, leases, lease_s=lease_s)

    async def release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Return an item to the queue (idempotent); raises HubError if the lease is lost."""
        await self.start()
        if not await self.backend(queue).release(queue, lease, reason=reason[:1000]):
            raise lease_lost(queue, lease)

    # ------------------------------------------------------------------------- dead letters

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters, oldest first."""
        await self.start()
        return await self.backend(queue).dead_letters(queue, limit=limit)

    async def requeue(self, queue: str, seqs: Sequence[int] | None = None) -> int:
        """Make dead letters ready again, with no attempts (None: all); return how many."""
        await self.start()
        return await self.backend(queue).requeue(queue, seqs)

    async def discard(self, queue: str, seqs: Sequence[int] | None = None) -> int:
        """Delete dead letters (None: all); return how many."""
        await self.start()
        return await self.backend(queue).discard(queue, seqs)

    # ------------------------------------------------------------------------- housekeeping

    async def expire(self) -> int:
        """Release items with ended leases, drop old ones; return how many were released."""
        await self.start()
        count = 0
        for backend in self._backends:
            count += await backend.expire()
        now = self._clock.wall()
        for state in list(self._states.values()):
            if (over := state.depth.dead - MAX_DEAD) > 0:
                letters = await self.dead_letters(state.queue, limit=over)
                await self.discard(state.queue, [letter.seq for letter in letters])
            if self._states.get(state.queue) is not state:
                continue  # it was removed meanwhile
            quiet = state.rate_in.is_quiet(now=now) and state.rate_out.is_quiet(now=now)
            if state.idle and quiet:
                self.room.remove(self._states.pop(state.queue))
            if state.options.keep_s > 0 and (state.ready or state.depth.dead):
                await self.backend(state.queue).drop_older(state.queue, now - state.options.keep_s)
        return count

    async def depths(self) -> dict[str, QueueDepth]:
        """Return the depth of each queue that has unfinished items."""
        await self.start()
        depths = {name: state.depth for name, state in self._states.items()}
        return {name: depth for name, depth in depths.items() if depth != QueueDepth()}

    async def rows(self) -> list[dict[str, Any]]:
        """Return a row per queue, sorted by name, for the dashboard and the CLI."""
        await self.start()
        oldest: dict[str, float] = {}
        for backend in self._backends:
            filled = [n for n, state in self._states.items() if state.ready]
            oldest |= await backend.oldest([n for n in filled if self.backend(n) is backend])
        now = self._clock.wall()
        return [
            state.row(now=now, oldest=oldest.get(name), consumers=self.wait_list.number(name))
            for name, state in sorted(self._states.items())
        ]

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic with this prefix."""
        await self.start()
        await self.backend(prefix).remove(prefix)
        for queue in [queue for queue in self._states if queue.startswith(prefix)]:
            self.room.remove(self._states.pop(queue))
        self.topics.forget(prefix)

    # ---------------------------------------------------------------------------- internals

    def backend(self, queue: str) -> Backend:
        """Return the backend of a queue."""
        return self._internal if queue.startswith(INTERNAL) else self._users

    def state(self, queue: str) -> QueueState:
        """Return the state of a queue, creating it if needed."""
        state = self._states.get(queue)
        if state is None:
            options = UNLIMITED if queue.startswith(INTERNAL) else DEFAULT
            state = self._states[queue] = QueueState(queue, options)
            self.room.add(state)
        return state

    def _attempts(self, queue: str) -> int:
        state = self._states.get(queue)
        return (state.options if state else DEFAULT).max_attempts

    def _apply(self, moves: Sequence[Move]) -> None:
        now = self._clock.wall()
        for move in moves:
            state = self.state(move.queue)
            state.apply(move, now=now)
            if move.target == ItemState.READY:
                if state.topic:
                    self.wait_list.wake_all(move.queue)
                else:
                    self.wait_list.wake(move.queue, move.items)
            elif state.topic:
                self.topics.dropped(move.queue)
            else:
                state.freed()
