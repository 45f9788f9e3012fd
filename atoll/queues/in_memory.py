"""Queues and topics inside one process, with the hub's behaviour but without a hub.

For a program that was started by hand. Items are lost when the process ends.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import AtollError, HubError, QueueFull, WireError
from atoll.queues.serialization import Parts
from atoll.wire.messages import (
    Done,
    Message,
    QueueAckMany,
    QueueClaim,
    QueueEntry,
    QueueExtendMany,
    QueueItem,
    QueueItems,
    QueueLost,
    QueueOpen,
    QueueOptions,
    QueuePutMany,
    QueuePutManyDone,
    QueueRelease,
    TopicAck,
    TopicItem,
    TopicItems,
    TopicPublish,
    TopicRead,
)

MAX_CLAIM_BYTES = 2**20

KEYS_KEPT = 100_000
"""Keys remembered per queue, so that an item with the same key is stored once."""


@dataclass(slots=True, eq=False)
class _Kept:
    """One item."""

    seq: int
    entry: QueueEntry
    put: float
    attempt: int = 0
    lease: str = ""
    until: float = 0.0
    dead: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.entry.payload) + self.entry.nbytes


@dataclass(slots=True)
class _Named:
    """One queue or topic: its items in order, and its subscriptions."""

    options: QueueOptions = field(default_factory=QueueOptions)
    items: dict[int, _Kept] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    positions: dict[str, int] = field(default_factory=dict)
    dropped: int = 0

    def alive(self) -> list[_Kept]:
        return [item for item in self.items.values() if not item.dead]

    def ready(self, now: float) -> list[_Kept]:
        """Return the claimable items, after ending expired leases."""
        found: list[_Kept] = []
        for item in self.alive():
            if item.until > now:
                continue
            if item.until and item.attempt >= self.options.max_attempts:
                item.dead = True
            else:
                found.append(item)
        return found

    def room_for(self, entries: Sequence[QueueEntry]) -> bool:
        held = self.alive()
        items = len(held) + len(entries)
        nbytes = sum(item.nbytes for item in held)
        nbytes += sum(len(entry.payload) + entry.nbytes for entry in entries)
        options = self.options
        return not (0 < options.max_items < items or 0 < options.max_bytes < nbytes)

    def drop_oldest(self, now: float) -> _Kept | None:
        """Drop and return the oldest item that is not leased; None if there is none."""
        for item in self.ready(now):
            self.dropped = item.seq
            return self.items.pop(item.seq)
        return None


class InMemoryChannel:
    """The channel of a process without a hub."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._named: dict[str, _Named] = {}
        self._blobs: dict[str, bytes] = {}
        self._uses: Counter[str] = Counter()
        """Items and pending puts with each blob: equal payloads are kept once."""
        self._next = 1
        self._answers: dict[type[Message], Callable[[Any, float], Message | None]] = {
            QueueOpen: self._open,
            QueuePutMany: lambda b, now: self._put(b.queue, b.items, topic=False, now=now),
            TopicPublish: lambda b, now: self._put(b.topic, b.items, topic=True, now=now),
            QueueClaim: self._claim,
            QueueAckMany: self._ack,
            QueueExtendMany: self._extend,
            QueueRelease: self._release,
            TopicRead: self._read,
            TopicAck: self._topic_ack,
        }

    def ask(self, body: Message, *, timeout_s: float) -> Message:
        """Return the hub's answer to a request."""
        answer = self._answers.get(type(body))
        if answer is None:
            raise WireError("unsupported message to a queue", given=type(body).__name__)
        deadline = time.monotonic() + min(getattr(body, "wait_s", 0.0), timeout_s)
        with self._condition:
            while True:
                done = answer(body, time.monotonic())
                if done is not None:
                    self._condition.notify_all()
                    return done
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return self._nothing(body)
                self._condition.wait(min(left_s, 0.1))  # the end of a lease notifies no thread

    def ask_later(self, body: Message, *, timeout_s: float) -> concurrent.futures.Future[Message]:
        """Return a completed future; a put that has to wait for room waits in a thread."""
        future: concurrent.futures.Future[Message] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(self.ask(body, timeout_s=timeout_s))
            except AtollError as error:
                future.set_exception(error)

        if getattr(body, "wait_s", 0.0) > 0:
            threading.Thread(target=work, name="queue put", daemon=True).start()
        else:
            work()
        return future

    def put_large(self, parts: Parts) -> tuple[str, int]:
        """Keep a payload in memory for an item that is put next."""
        payload = b"".join(parts)
        sha256 = hashlib.sha256(payload).hexdigest()
        with self._condition:
            self._blobs[sha256] = payload
            self._uses[sha256] += 1
        return sha256, len(payload)

    def release_large(self, sha256: str) -> None:
        """Drop a payload, unless another item or put has it."""
        with self._condition:
            self._forget_blob(sha256)

    @contextlib.contextmanager
    def large(self, sha256: str) -> Iterator[Path]:
        """Write a payload to a temporary file."""
        with self._condition:
            payload = self._blobs.get(sha256)
        if payload is None:
            raise HubError("this payload is no longer stored", given=sha256)
        with tempfile.TemporaryDirectory(prefix="atoll-payload-") as folder:
            path = Path(folder) / "payload"
            path.write_bytes(payload)
            yield path

    def close(self) -> None:
        """Do nothing: no resources are open."""

    # ------------------------------------------------------------------------- answers

    def _nothing(self, body: Message) -> Message:
        """Return, or raise, the result of a wait that timed out."""
        if isinstance(body, QueueClaim):
            return QueueItems([])
        if isinstance(body, TopicRead):
            named = self._get(body.topic)
            return TopicItems([], named.positions[body.subscription])
        raise QueueFull("this queue is full", given=str(getattr(body, "queue", "")))

    def _get(self, name: str) -> _Named:
        return self._named.setdefault(name, _Named())

    def _open(self, body: QueueOpen, now: float) -> Message:
        self._get(body.queue).options = body.options
        return Done()

    def _put(
        self, name: str, entries: list[QueueEntry], *, topic: bool, now: float
    ) -> Message | None:
        named = self._get(name)
        new = [entry for entry in entries if entry.key not in named.keys]
        while new and not named.room_for(new):
            if not topic and named.options.overflow == "wait":
                return None
            dropping = topic or named.options.overflow == "drop-oldest"
            dropped = named.drop_oldest(now) if dropping else None
            if dropped is None:
                raise QueueFull("this queue is full", given=name)
            self._forget_blob(dropped.entry.blob)
        seqs: list[int] = []
        duplicates: list[int] = []
        for place, entry in enumerate(entries):
            if entry.key in named.keys:
                duplicates.append(place)
                self._forget_blob(entry.blob)
            else:
                named.keys[entry.key] = self._next
                named.items[self._next] = _Kept(self._next, entry, time.time())
                self._next += 1
            seqs.append(named.keys[entry.key])
        for key in list(named.keys)[: max(0, len(named.keys) - KEYS_KEPT)]:
            del named.keys[key]
        return QueuePutManyDone(seqs, duplicates)

    def _claim(self, body: QueueClaim, now: float) -> Message | None:
        claimed: list[QueueItem] = []
        nbytes = 0
        for item in self._get(body.queue).ready(now):
            nbytes += len(item.entry.payload)
            if len(claimed) >= max(1, body.limit) or (claimed and nbytes > MAX_CLAIM_BYTES):
                break
            item.attempt += 1
            item.lease, item.until = f"{item.seq}.{item.attempt}", now + body.lease_s
            entry = item.entry
            claimed.append(
                QueueItem(item.seq, entry.key, entry.payload, item.attempt, item.lease, entry.blob)
            )
        return QueueItems(claimed) if claimed else None

    def _held(self, queue: str, lease: str) -> _Kept | None:
        number = lease.partition(".")[0]
        item = self._get(queue).items.get(int(number) if number.isdigit() else -1)
        return item if item is not None and item.lease == lease and not item.dead else None

    def _ack(self, body: QueueAckMany, now: float) -> Message:
        lost: list[str] = []
        named = self._get(body.queue)
        for lease in body.leases:
            item = self._held(body.queue, lease)
            if item is None:
                lost.append(lease)
                continue
            del named.items[item.seq]
            self._forget_blob(item.entry.blob)
        return QueueLost(lost)

    def _forget_blob(self, sha256: str) -> None:
        """Drop a large payload with the last item or put that has it."""
        self._uses[sha256] -= 1
        if self._uses[sha256] <= 0:
            del self._uses[sha256]
            self._blobs.pop(sha256, None)

    def _extend(self, body: QueueExtendMany, now: float) -> Message:
        lost: list[str] = []
        for lease in body.leases:
            item = self._held(body.queue, lease)
            if item is None or item.until <= now:
                lost.append(lease)
            else:
                item.until = now + body.lease_s
        return QueueLost(lost)

    def _release(self, body: QueueRelease, now: float) -> Message:
        item = self._held(body.queue, body.lease)
        if item is None:
            raise HubError("this lease is not held any more", given=body.lease)
        item.until, item.lease = 0.0, ""
        item.dead = item.attempt >= self._get(body.queue).options.max_attempts
        return Done()

    def _read(self, body: TopicRead, now: float) -> Message | None:
        named = self._get(body.topic)
        newest = max(named.items, default=named.dropped)
        first = newest if body.start == "new" else named.dropped
        position = named.positions.setdefault(body.subscription, first)
        after = max(body.after, position)
        missed = named.dropped > after
        found = [item for seq, item in named.items.items() if seq > after][: max(0, body.limit)]
        if not found and body.limit > 0:
            return None
        items = [TopicItem(i.seq, i.entry.key, i.entry.payload, i.put, i.entry.blob) for i in found]
        return TopicItems(items, position, missed)

    def _topic_ack(self, body: TopicAck, now: float) -> Message:
        positions = self._get(body.topic).positions
        positions[body.subscription] = max(body.seq, positions.get(body.subscription, 0))
        return Done()
