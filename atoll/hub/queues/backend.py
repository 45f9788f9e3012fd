"""The protocol of queue backends, and the values that they share.

A backend stores items and reports how they *move* between states; `Queues` derives limits, waiting
clients, rates and depths from that. Leases end by the wall clock, as they outlive the process.
"""

from __future__ import annotations

import enum
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atoll.errors import LeaseEnded
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

MAX_CLAIM = 1_000

MAX_CLAIM_BYTES = 1 * 2**20
"""Maximum payload bytes per claim; a larger first item is returned alone."""

DONE_KEPT_S = 3_600.0
"""How long the key of a done item is remembered to recognize a repeated put."""

INTERNAL_KEPT_S = 7 * 86_400.0
"""The same for the hub's own queues."""

DONE_KEPT = 1_000_000
"""Keys of done items remembered over all queues; the oldest are forgotten first."""

MAX_DEAD = 10_000
"""Dead letters kept per queue; the oldest are deleted first."""

INTERNAL = "node/"

DROPPED = ""
"""Reserved subscription: its position is the newest dropped item."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of items and their payload bytes."""

    items: int = 0
    nbytes: int = 0


NOTHING = Amount()


class ItemState(enum.StrEnum):
    """State of an item."""

    NEW = "new"
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    DROPPED = "dropped"
    """Deleted for space, age, or on request."""


@dataclass(frozen=True, slots=True)
class Move:
    """Items of one queue that changed state; ready to ready only wakes waiting claims."""

    queue: str
    source: ItemState
    target: ItemState
    items: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An item that was released too often."""

    seq: int
    key: str
    payload: bytes
    attempts: int
    reason: str
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """Result of a put: the number of each item, and the indices of known keys."""

    seqs: list[int]
    duplicates: list[int]


@dataclass(slots=True)
class Loaded:
    """Content of a backend when it is opened."""

    options: dict[str, QueueOptions] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    """Those of `options` that are topics."""
    amounts: dict[str, dict[str, Amount]] = field(default_factory=dict)


Listener = Callable[[Sequence[Move]], None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Optional guarantees of a backend; the contract suite reads them."""

    atomic_puts: bool = True
    """A put of many is stored whole or not at all, even across a crash."""
    remembers_claims: bool = True
    """A restarted hub knows the requests of claims and the ends of leases."""
    exact_counts: bool = True
    """Item states are exact, because only this hub changes them."""


class Backend(Protocol):
    """Stores the items of queues. Methods return after the change is durable, where possible."""

    capabilities: Capabilities
    attempts: Callable[[str], int]
    """Claims after which an item of a queue becomes a dead letter."""
    moved: Listener
    """Called with every move once it is durable, before the caller gets its result."""

    async def load(self) -> Loaded:
        """Return what is stored; called once, before anything else."""
        ...

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Store the options of a queue or topic."""
        ...

    def put(self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount) -> Awaitable[Stored]:
        """Store items in order, all or none, once per key; drop `drop` oldest ready ones."""
        ...

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of items with these keys, including done ones."""
        ...

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first; a repeated `request` gets the same items."""
        ...

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Mark leased items as done (idempotent); return the lost leases."""
        ...

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Extend leases; return the lost ones."""
        ...

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Return an item to the queue if it is leased; False if the lease is lost."""
        ...

    async def expire(self) -> int:
        """Release items with ended leases, forget old keys; return how many were released."""
        ...

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items put before this wall time."""
        ...

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return the put time of the oldest ready item of each queue that has one."""
        ...

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return dead letters, oldest first."""
        ...

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again, with no attempts (None: all); return how many."""
        ...

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Delete dead letters (None: all); return how many."""
        ...

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return ready items with a number above `after`, in order, without claiming them."""
        ...

    async def last(self, topic: str) -> int:
        """Return the number of the newest ready item; 0 without any."""
        ...

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription, and of `DROPPED`."""
        ...

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Store the position of a subscription."""
        ...

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic with this prefix; safe to repeat after an interruption."""
        ...

    async def close(self) -> None:
        """Stop background work."""
        ...


class HeldBlobs(Protocol):
    """The part of the hub's blobs that queues need."""

    def nbytes(self, sha256: str) -> int:
        """Return the size of a blob; raises HubError if it does not exist."""
        ...

    def hold(self, connection: sqlite3.Connection, sha256: str, owner: str) -> None:
        """Take a reference for `owner`, inside a write; HubError if the blob does not exist."""
        ...

    def drop(self, connection: sqlite3.Connection, owner: str) -> None:
        """Drop the references of an owner, inside a write."""
        ...

    def drop_all(self, connection: sqlite3.Connection, prefix: str) -> None:
        """Drop the references of all owners with this prefix, inside a write."""
        ...


def size_of(entry: QueueEntry) -> int:
    """Return the payload bytes of an item, inline or in a blob."""
    return len(entry.payload) + entry.nbytes


def need_of(entries: Sequence[QueueEntry]) -> Amount:
    """Return the amount of items and bytes to be stored."""
    return Amount(len(entries), sum(map(size_of, entries)))


def retention_s(queue: str) -> float:
    """Return how long keys of done items are remembered."""
    return INTERNAL_KEPT_S if queue.startswith(INTERNAL) else DONE_KEPT_S


def new_lease_mark() -> str:
    """Return the common suffix of the leases of one claim."""
    return secrets.token_hex(8)


def lease_name(seq: int, mark: str) -> str:
    """Return the lease of one item in a claim."""
    return f"{seq}.{mark}"


def lease_seq(lease: str) -> int:
    """Return the item number of a lease; -1 if the text is not a lease."""
    number = lease.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1


def lease_lost(queue: str, lease: str) -> LeaseEnded:
    """Return the error for a lost lease."""
    return LeaseEnded(
        "this lease is not held any more",
        given=f"{lease!r} of queue {queue!r}",
        expected="a lease whose time has not ended",
        remedy="claim again; extend leases of long work before they end",
    )


def sum_moves(queue: str, source: ItemState, target: ItemState, sizes: Sequence[int]) -> list[Move]:
    """Return the move of items with these sizes; empty if there are none."""
    return [Move(queue, source, target, len(sizes), sum(sizes))] if sizes else []


def amounts_of(
    rows: Sequence[tuple[str, str, int, int]],
) -> dict[str, dict[str, Amount]]:
    """Convert rows of queue, state, items, bytes into `Loaded.amounts`."""
    found: dict[str, dict[str, Amount]] = {}
    for queue, state, items, nbytes in rows:
        found.setdefault(queue, {})[state] = Amount(items, nbytes)
    return found


def no_attempts(queue: str) -> int:
    """Default of `Backend.attempts`."""
    return QueueOptions().max_attempts


def no_notifications(moves: Sequence[Move]) -> None:
    """Default of `Backend.moved`."""
