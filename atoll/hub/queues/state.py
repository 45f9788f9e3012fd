"""In-memory state of one queue: counts, limits, rates, waiting producers and claims."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from atoll.errors import QueueFull
from atoll.hub.queues.backend import Amount, ItemState, Move
from atoll.wire.messages import QueueOptions

RATE_S = 10
"""Window of rates."""

_COUNTED = (ItemState.READY, ItemState.LEASED, ItemState.DEAD)


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """Number of items of a queue by state."""

    ready: int = 0
    leased: int = 0
    dead: int = 0


class Rate:
    """Events per second over the last `RATE_S` whole seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (RATE_S + 1)
        self._second = 0

    def add(self, number: int, *, now: float) -> None:
        """Count events."""
        self._turn(int(now))
        self._counts[self._second % len(self._counts)] += number

    def per_s(self, *, now: float) -> float:
        """Return the mean rate, without the current incomplete second."""
        self._turn(int(now))
        return (sum(self._counts) - self._counts[self._second % len(self._counts)]) / RATE_S

    def is_quiet(self, *, now: float) -> bool:
        """Return whether nothing was counted, in the current second either."""
        self._turn(int(now))
        return not any(self._counts)

    def _turn(self, second: int) -> None:
        behind = second - self._second
        if behind <= 0:
            return
        for step in range(min(behind, len(self._counts))):
            self._counts[(second - step) % len(self._counts)] = 0
        self._second = second


@dataclass(slots=True, eq=False)
class _Producer:
    need: Amount
    admitted: asyncio.Future[None]


class QueueState:
    """Counts and limits of one queue, and its waiting producers."""

    def __init__(self, queue: str, options: QueueOptions, room: Room | None = None) -> None:
        self.queue = queue
        self.options = options
        self.room = room
        """Shared with the other queues of its job; None: only its own options limit it."""
        self._reported_bytes = 0
        self.declared = False
        self.topic = False
        self.subscribers = 0
        self._items = dict.fromkeys(_COUNTED, 0)
        self._bytes = dict.fromkeys(_COUNTED, 0)
        self._reserved_items = 0
        self._reserved_bytes = 0
        self._producers: collections.deque[_Producer] = collections.deque()
        self.rate_in, self.rate_out = Rate(), Rate()

    # ------------------------------------------------------------------------------- counts

    @property
    def depth(self) -> QueueDepth:
        """Number of items by state."""
        return QueueDepth(
            self._items[ItemState.READY], self._items[ItemState.LEASED], self._items[ItemState.DEAD]
        )

    @property
    def ready(self) -> int:
        """Items that may be claimed."""
        return self._items[ItemState.READY]

    @property
    def nbytes(self) -> int:
        """Payload bytes of all items that are not done."""
        return sum(self._bytes.values())

    @property
    def held_bytes(self) -> int:
        """`nbytes`, plus what is about to be stored."""
        return self.nbytes + self._reserved_bytes

    @property
    def waiting(self) -> int:
        """Producers waiting for space."""
        return len(self._producers)

    @property
    def idle(self) -> bool:
        """Whether this object can be discarded without loss."""
        return not (
            self.declared or self._producers or self._reserved_items or any(self._items.values())
        )

    def row(self, *, now: float, oldest: float | None, consumers: int) -> dict[str, Any]:
        """Return the row for the dashboard and the CLI; `consumers` are waiting claims."""
        depth, options = self.depth, self.options
        return {
            "queue": self.queue,
            "kind": "topic" if self.topic else "queue",
            "ready": depth.ready,
            "leased": depth.leased,
            "dead": depth.dead,
            "bytes": self.nbytes,
            "oldest_s": 0.0 if oldest is None else max(0.0, now - oldest),
            "in_per_s": self.rate_in.per_s(now=now),
            "out_per_s": self.rate_out.per_s(now=now),
            "max_items": options.max_items,
            "max_bytes": options.max_bytes,
            "overflow": "drop-oldest" if self.topic else options.overflow,
            "waiting_producers": self.waiting,
            "subscribers": self.subscribers if self.topic else consumers,
        }

    def load(self, state: ItemState, amount: Amount) -> None:
        """Set the amount that was stored before the hub started."""
        self._items[state] = amount.items
        self._bytes[state] = amount.nbytes
        self._tell()

    def apply(self, move: Move, *, now: float) -> None:
        """Count a move."""
        if move.source == move.target:
            return
        if move.source in self._items:
            self._items[move.source] -= move.items
            self._bytes[move.source] -= move.nbytes
            if not self._items[move.source]:
                self._bytes[move.source] = 0  # loaded values may be estimates
        if move.target in self._items:
            self._items[move.target] += move.items
            self._bytes[move.target] += move.nbytes
        self._tell()
        if move.source == ItemState.NEW:
            self.rate_in.add(move.items, now=now)
        elif move.target == ItemState.DONE:
            self.rate_out.add(move.items, now=now)

    # -------------------------------------------------------------------------------- space

    def reserve(self, need: Amount) -> bool:
        """Reserve space for a put if available and no producer waits; `free` returns it."""
        if self._producers or not self._fits(need):
            return False
        self._take(need)
        return True

    def reserve_by_dropping(self, need: Amount) -> Amount:
        """Reserve space; return what must be dropped for it. Raises QueueFull."""
        options = self.options
        items = nbytes = 0
        if options.max_items:
            items = max(0, self._held_items + need.items - options.max_items)
        if options.max_bytes:
            nbytes = max(0, self._held_bytes + need.nbytes - options.max_bytes)
        if self.room is not None:
            nbytes = max(nbytes, -self.room.left(self, need.nbytes))
        if items > self._items[ItemState.READY] or nbytes > self._bytes[ItemState.READY]:
            raise self.full(need)
        self._take(need)
        return Amount(items, nbytes)

    async def wait(self, need: Amount, *, wait_s: float) -> None:
        """Reserve space in order of arrival; raises QueueFull after `wait_s`, or if impossible."""
        if not self._could_fit(need) or wait_s <= 0:
            raise self.full(need)
        producer = _Producer(need, asyncio.get_running_loop().create_future())
        self._producers.append(producer)
        room = self.room  # it may be another one, or none, when the wait ends
        if room is not None:
            room.waiting += 1
            room.refusal(self, need.nbytes)  # notes the limit in the ledger
        try:
            await asyncio.wait([producer.admitted], timeout=wait_s)
        except asyncio.CancelledError:
            if producer.admitted.done():
                self.free(need)
            raise
        finally:
            if room is not None:
                room.waiting -= 1
            if producer in self._producers:
                self._producers.remove(producer)
                self.admit()  # a smaller put behind it may fit
        if not producer.admitted.done():
            raise self.full(need)

    def free(self, need: Amount) -> None:
        """Return reserved space: the items are counted now, or were not stored."""
        self._reserve(-need.items, -need.nbytes)

    def admit(self) -> None:
        """Admit waiting producers in order of arrival while there is space."""
        while self._producers and self._fits(self._producers[0].need):
            producer = self._producers.popleft()
            self._take(producer.need)
            producer.admitted.set_result(None)

    def freed(self) -> None:
        """Admit producers, first those of this queue, if there is room now."""
        self.admit()
        if self.room is not None:
            self.room.freed(self)

    def full(self, need: Amount) -> QueueFull:
        """Return the error for a put without space."""
        if self.room is not None and (error := self.room.refusal(self, need.nbytes)) is not None:
            return error
        options = self.options
        return QueueFull(
            "this queue is full",
            given=f"{need.items} items, {need.nbytes} bytes for {self.queue!r}, which holds"
            f" {self._held_items} items, {self._held_bytes} bytes",
            expected=f"at most {options.max_items or 'any number of'} items and"
            f" {options.max_bytes or 'any number of'} bytes",
            remedy="consume faster, give it more room (max_items, max_bytes), or let it"
            ' wait or drop (overflow = "wait" or "drop-oldest")',
        )

    @property
    def _held_items(self) -> int:
        return self._items[ItemState.READY] + self._items[ItemState.LEASED] + self._reserved_items

    @property
    def _held_bytes(self) -> int:
        return self._bytes[ItemState.READY] + self._bytes[ItemState.LEASED] + self._reserved_bytes

    def _fits(self, need: Amount) -> bool:
        options = self.options
        return (
            (not options.max_items or self._held_items + need.items <= options.max_items)
            and (not options.max_bytes or self._held_bytes + need.nbytes <= options.max_bytes)
            and (self.room is None or self.room.left(self, need.nbytes) >= 0)
        )

    def _could_fit(self, need: Amount) -> bool:
        options = self.options
        return not (0 < options.max_items < need.items or 0 < options.max_bytes < need.nbytes) and (
            self.room is None or self.room.could_hold(self, need.nbytes)
        )

    def _take(self, need: Amount) -> None:
        self._reserve(need.items, need.nbytes)

    def _reserve(self, items: int, nbytes: int) -> None:
        self._reserved_items += items
        self._reserved_bytes += nbytes
        if self.room is not None:
            self.room.nbytes += nbytes
            self._reported_bytes += nbytes

    def _tell(self) -> None:
        """Tell the shared room how the bytes of this queue have changed."""
        if self.room is not None:
            held = self.held_bytes
            self.room.nbytes += held - self._reported_bytes
            self._reported_bytes = held


class Room(Protocol):
    """The bytes that several queues share."""

    nbytes: int
    """What they hold, as each queue adds it."""
    waiting: int
    """Producers that wait at any of its queues."""

    def left(self, state: QueueState, more: int) -> int:
        """Return the bytes that are left after `more` come to a queue; negative: too few."""
        ...

    def could_hold(self, state: QueueState, more: int) -> bool:
        """Return whether so many bytes would fit if all else were gone."""
        ...

    def refusal(self, state: QueueState, more: int) -> QueueFull | None:
        """Return the error if so many bytes do not fit; None: they do."""
        ...

    def freed(self, state: QueueState) -> None:
        """Admit producers of the other queues, if there is room now."""
        ...


T = TypeVar("T")

MAX_WAIT_S = 60.0
"""Maximum wait of a claim for its first item, and of a put for space."""


class WaitList:
    """Waiting claims in order of arrival per queue; one put wakes one claim, not all."""

    def __init__(self) -> None:
        self._lines: dict[str, collections.deque[asyncio.Future[None]]] = {}

    def wake(self, queue: str, number: int = 1) -> None:
        """Wake up to `number` claims of this queue, oldest first."""
        line = self._lines.get(queue)
        while line and number > 0:
            woken = line.popleft()
            if not woken.done():
                woken.set_result(None)
                number -= 1

    def wake_all(self, queue: str) -> None:
        """Wake all claims that wait at this queue."""
        self.wake(queue, len(self._lines.get(queue, ())))

    def number(self, queue: str) -> int:
        """Return how many claims wait at this queue."""
        return len(self._lines.get(queue, ()))

    async def until_some(
        self,
        queue: str,
        attempt: Callable[[], Awaitable[list[T]]],
        *,
        limit: int,
        wait_s: float,
    ) -> list[T]:
        """Return the first non-empty result of `attempt`, retried at every wake-up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MAX_WAIT_S)
        more = True  # a claim that did not empty the queue wakes the next one
        woken: asyncio.Future[None] = loop.create_future()
        try:
            while True:
                # Registered before the attempt, so that a put in between finds a claim to wake.
                woken = loop.create_future()
                self._lines.setdefault(queue, collections.deque()).append(woken)
                items = await attempt()
                left_s = deadline - loop.time()
                if items or left_s <= 0:
                    more = len(items) == limit
                    return items
                await asyncio.wait([woken], timeout=left_s)
                self._leave(queue, woken)
        finally:
            self._leave(queue, woken)
            if more:
                self.wake(queue)

    def _leave(self, queue: str, woken: asyncio.Future[None]) -> None:
        line = self._lines.get(queue)
        if line is None:
            return
        if woken in line:
            line.remove(woken)
        if not line:
            del self._lines[queue]
