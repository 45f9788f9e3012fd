"""Queues in memory, for tests and simulation; the same promises as on disk but durability."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from atoll.clock import Clock
from atoll.hub.queues.backend import (
    DONE_KEPT,
    DROPPED,
    MAX_CLAIM_BYTES,
    Amount,
    DeadLetter,
    Listener,
    Loaded,
    Move,
    Stored,
    lease_name,
    lease_seq,
    new_lease_mark,
    no_attempts,
    no_notifications,
    retention_s,
    size_of,
)
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem


@dataclass(slots=True)
class _Item:
    """One item; `lease` keeps its last value after the lease ended."""

    seq: int
    queue: str
    key: str
    payload: bytes
    blob: str
    nbytes: int
    put: float
    state: str = "ready"
    attempt: int = 0
    lease: str = ""
    request: str = ""
    until: float = 0.0
    reason: str = ""

    def handed_out(self) -> QueueItem:
        return QueueItem(self.seq, self.key, self.payload, self.attempt, self.lease, self.blob)


class MemoryBackend:
    """Named queues in one dictionary; see `atoll.hub.queues.backend.Backend` for the promises."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._items: dict[int, _Item] = {}
        self._keys: dict[tuple[str, str], int] = {}
        self._options: dict[str, tuple[QueueOptions, bool]] = {}
        self._positions: dict[tuple[str, str], int] = {}
        self._next = 1
        self.attempts: Callable[[str], int] = no_attempts
        self.moved: Listener = no_notifications

    async def load(self) -> Loaded:
        """Return what is stored."""
        loaded = Loaded(
            options={queue: options for queue, (options, _) in self._options.items()},
            topics={queue for queue, (_, topic) in self._options.items() if topic},
        )
        for item in self._items.values():
            if item.state != "done":
                of_queue = loaded.amounts.setdefault(item.queue, {})
                before = of_queue.get(item.state, Amount())
                of_queue[item.state] = Amount(before.items + 1, before.nbytes + item.nbytes)
        return loaded

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Keep the options of a queue or topic."""
        self._options[queue] = (options, topic)

    async def put(self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount) -> Stored:
        """Store items once per key."""
        self._drop_oldest(queue, drop)
        seqs: list[int] = []
        duplicates: list[int] = []
        nbytes = 0
        for place, entry in enumerate(entries):
            known = self._keys.get((queue, entry.key))
            if known is not None:
                seqs.append(known)
                duplicates.append(place)
                continue
            item = _Item(
                self._next, queue, entry.key, bytes(entry.payload), entry.blob, size_of(entry),
                self._clock.wall(),
            )  # fmt: skip
            self._next += 1
            self._items[item.seq] = item
            self._keys[queue, entry.key] = item.seq
            seqs.append(item.seq)
            nbytes += item.nbytes
        new = len(seqs) - len(duplicates)
        if new:
            self.moved([Move(queue, "new", "ready", new, nbytes)])
        return Stored(seqs, duplicates)

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of items that have these keys."""
        return {key: self._keys[queue, key] for key in keys if (queue, key) in self._keys}

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first."""
        self._expire()
        own = self._of(queue)
        if request:
            again = [i for i in own if i.state == "leased" and i.request == request]
            if again:
                return [item.handed_out() for item in again]
        taken: list[_Item] = []
        nbytes, mark = 0, new_lease_mark()
        for item in own:
            if item.state != "ready":
                continue
            nbytes += len(item.payload)
            if len(taken) == limit or (taken and nbytes > MAX_CLAIM_BYTES):
                break
            item.request, item.lease = request, lease_name(item.seq, mark)
            item.attempt += 1
            item.until = self._clock.wall() + lease_s
            taken.append(item)
        self._move(taken, "leased")
        return [item.handed_out() for item in taken]

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Make leased items done."""
        lost: list[str] = []
        for lease in leases:
            item = self._find(queue, lease)
            if item is None:
                lost.append(lease)
            elif item.state != "done":
                self._finish(item, "done")
        return lost

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Let leases end later."""
        self._expire()
        lost: list[str] = []
        for lease in leases:
            item = self._find(queue, lease)
            if item is None or item.state != "leased":
                lost.append(lease)
            else:
                item.until = self._clock.wall() + lease_s
        return lost

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Give an item back."""
        item = self._find(queue, lease)
        if item is not None and item.state == "leased":
            self._give_back([item], reason)
        return item is not None

    async def expire(self) -> int:
        """Take back items whose lease ended; forget old keys."""
        now = self._clock.wall()
        done = [item for item in self._items.values() if item.state == "done"]
        over = len(done) - DONE_KEPT
        for number, item in enumerate(done):
            if number < over or item.until <= now:
                del self._items[item.seq], self._keys[item.queue, item.key]
        return self._expire()

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items that are too old."""
        for item in self._of(queue):
            if item.put < before and item.state in ("ready", "dead"):
                self._finish(item, "dropped")

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return when the oldest ready item of each queue was put."""
        found: dict[str, float] = {}
        for item in self._items.values():
            if item.state == "ready" and item.queue in queues:
                found.setdefault(item.queue, item.put)
        return found

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return items that were given back too often."""
        dead = self._dead(queue, None)[:limit]
        return [DeadLetter(i.seq, i.key, i.payload, i.attempt, i.reason, i.blob) for i in dead]

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again."""
        dead = self._dead(queue, seqs)
        for item in dead:
            item.attempt = 0
        self._move(dead, "ready")
        return len(dead)

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Give dead letters up for good."""
        dead = self._dead(queue, seqs)
        for item in dead:
            self._finish(item, "dropped")
        return len(dead)

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return ready items after a number."""
        ready = [i for i in self._of(topic) if i.state == "ready" and i.seq > after]
        return [TopicItem(i.seq, i.key, i.payload, i.put, i.blob) for i in ready[:limit]]

    async def last(self, topic: str) -> int:
        """Return the number of the newest ready item."""
        return max((i.seq for i in self._of(topic) if i.state == "ready"), default=0)

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription."""
        return {name: seq for (of, name), seq in self._positions.items() if of == topic}

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Keep the position of a subscription."""
        self._positions[topic, subscription] = seq

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic whose name begins so."""
        self._items = {s: i for s, i in self._items.items() if not i.queue.startswith(prefix)}
        self._keys = {k: seq for k, seq in self._keys.items() if not k[0].startswith(prefix)}
        self._options = {q: o for q, o in self._options.items() if not q.startswith(prefix)}
        self._positions = {p: s for p, s in self._positions.items() if not p[0].startswith(prefix)}

    async def close(self) -> None:
        """Nothing runs in the background."""

    # --------------------------------------------------------------------------- inside

    def _of(self, queue: str) -> list[_Item]:
        return [item for item in self._items.values() if item.queue == queue]

    def _dead(self, queue: str, seqs: Sequence[int] | None) -> list[_Item]:
        return [
            item
            for item in self._of(queue)
            if item.state == "dead" and (seqs is None or item.seq in seqs)
        ]

    def _find(self, queue: str, lease: str) -> _Item | None:
        item = self._items.get(lease_seq(lease))
        if item is None or item.queue != queue or item.lease != lease:
            return None
        return item

    def _move(self, items: Iterable[_Item], state: str) -> None:
        for item in items:
            source, item.state = item.state, state
            self.moved([Move(item.queue, source, state, 1, item.nbytes)])

    def _finish(self, item: _Item, end: str) -> None:
        """Let an item end; its key stays for a while."""
        source, item.state = item.state, "done"
        item.payload, item.until = b"", self._clock.wall() + retention_s(item.queue)
        if end == "dropped":
            self._positions[item.queue, DROPPED] = item.seq
        self.moved([Move(item.queue, source, end, 1, item.nbytes)])

    def _drop_oldest(self, queue: str, drop: Amount) -> None:
        items = nbytes = 0
        for item in self._of(queue):
            if items >= drop.items and nbytes >= drop.nbytes:
                return
            if item.state == "ready":
                items, nbytes = items + 1, nbytes + item.nbytes
                self._finish(item, "dropped")

    def _give_back(self, items: Sequence[_Item], reason: str) -> None:
        for item in items:
            item.reason = reason
            dead = item.attempt >= self.attempts(item.queue)
            self._move([item], "dead" if dead else "ready")

    def _expire(self) -> int:
        now = self._clock.wall()
        ended = [i for i in self._items.values() if i.state == "leased" and i.until <= now]
        self._give_back(ended, "the lease ended")
        return len(ended)
