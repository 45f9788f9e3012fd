"""The protocol of queue backends, and the values that they share.

A backend stores items and says how they *move* from one state to another. Everything that needs
only the counts of these moves (limits, producers and consumers that wait, rates, depths) is done
once, in `atoll.hub.queues.queues.Queues`.

Leases end by the wall clock, because they outlive the process that granted them.
"""

from __future__ import annotations

import enum
import secrets
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atoll.errors import HubError
from atoll.wire.messages import QueueEntry, QueueItem, QueueOptions, TopicItem

MAX_CLAIM = 1_000
"""Items in the answer to one claim."""

MAX_CLAIM_BYTES = 1 * 2**20
"""Payload bytes in the answer to one claim; a larger first item comes alone."""

DONE_KEPT_S = 3_600.0
"""How long the key of a done item is remembered, so that a put sent again is stored once."""

INTERNAL_KEPT_S = 7 * 86_400.0
"""The same for the hub's own queues."""

DONE_KEPT = 1_000_000
"""How many keys of done items are remembered over all queues; the oldest is forgotten first."""

MAX_DEAD = 10_000
"""Dead letters of one queue that are kept; the oldest goes first."""

INTERNAL = "node/"
"""How names of the hub's own queues begin."""

DROPPED = ""
"""No subscription has this name: its position is the newest item that was dropped."""


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of items and the bytes of their payloads."""

    items: int = 0
    nbytes: int = 0


NOTHING = Amount()


class ItemState(enum.StrEnum):
    """Where an item is in its life."""

    NEW = "new"
    """Before it was put."""
    READY = "ready"
    LEASED = "leased"
    DONE = "done"
    DEAD = "dead"
    DROPPED = "dropped"
    """Given up for room, for its age or on request."""


@dataclass(frozen=True, slots=True)
class Move:
    """Items of one queue that went from one state to another.

    From ready to ready says that more may be ready than is known; it wakes claims that wait.
    """

    queue: str
    source: ItemState
    target: ItemState
    items: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An item that was given back too often."""

    seq: int
    key: str
    payload: bytes
    attempts: int
    reason: str
    blob: str = ""


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of a put: the number of each item, and which keys were there already."""

    seqs: list[int]
    duplicates: list[int]


@dataclass(slots=True)
class Loaded:
    """What a backend holds when it is opened."""

    options: dict[str, QueueOptions] = field(default_factory=dict)
    topics: set[str] = field(default_factory=set)
    """Names in `options` that are topics."""
    amounts: dict[str, dict[str, Amount]] = field(default_factory=dict)
    """Queue -> state -> how much."""


Listener = Callable[[Sequence[Move]], None]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which clauses of the contract a backend keeps; the contract suite reads them."""

    atomic_puts: bool = True
    """A put of many is stored whole or not at all, also across a crash."""
    remembers_claims: bool = True
    """A hub that was restarted knows the requests of claims, and when leases end by its clock."""
    exact_counts: bool = True
    """What is known of an item's state is true: nothing changes it but this hub."""


class Backend(Protocol):
    """Stores the items of queues. Every method is durable, where it can be, before it returns."""

    capabilities: Capabilities
    attempts: Callable[[str], int]
    """Says after how many claims an item of a queue is a dead letter."""
    moved: Listener
    """Called with every move once it is durable, before the caller gets its answer."""

    async def load(self) -> Loaded:
        """Return what is stored; called once, before anything else."""
        ...

    async def set_options(self, queue: str, options: QueueOptions, *, topic: bool) -> None:
        """Keep the options of a queue or topic."""
        ...

    def put(self, queue: str, entries: Sequence[QueueEntry], *, drop: Amount) -> Awaitable[Stored]:
        """Store items in order, all or none, once per key; drop so many oldest ready ones."""
        ...

    async def known(self, queue: str, keys: Sequence[str]) -> dict[str, int]:
        """Return the numbers of the items, done ones included, that have these keys."""
        ...

    async def claim(
        self, queue: str, *, lease_s: float, limit: int, request: str
    ) -> list[QueueItem]:
        """Lease ready items, oldest first; those of the same request again, if there are any."""
        ...

    async def ack(self, queue: str, leases: Sequence[str]) -> list[str]:
        """Make leased items done, done ones stay so; return the leases that are lost."""
        ...

    async def extend(self, queue: str, leases: Sequence[str], *, lease_s: float) -> list[str]:
        """Let leases end later; return those that are lost."""
        ...

    async def release(self, queue: str, lease: str, *, reason: str) -> bool:
        """Give an item back; False when the lease is lost. What is not leased stays as it is."""
        ...

    async def expire(self) -> int:
        """Take back items whose lease ended, forget old keys; return how many were taken back."""
        ...

    async def drop_older(self, queue: str, before: float) -> None:
        """Drop ready and dead items that were put before this wall time."""
        ...

    async def oldest(self, queues: Sequence[str]) -> dict[str, float]:
        """Return when the oldest ready item of each queue was put, where there is one."""
        ...

    async def dead_letters(self, queue: str, *, limit: int) -> list[DeadLetter]:
        """Return items that were given back too often, oldest first."""
        ...

    async def requeue(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Make dead letters ready again, as if never claimed (None: all); return how many."""
        ...

    async def discard(self, queue: str, seqs: Sequence[int] | None) -> int:
        """Give dead letters up for good (None: all); return how many."""
        ...

    async def peek(self, topic: str, *, after: int, limit: int) -> list[TopicItem]:
        """Return ready items with a number above `after`, in order, and leave them as they are."""
        ...

    async def last(self, topic: str) -> int:
        """Return the number of the newest ready item; 0 without any."""
        ...

    async def positions(self, topic: str) -> dict[str, int]:
        """Return the position of each subscription; of `DROPPED`: the newest item dropped."""
        ...

    async def set_position(self, topic: str, subscription: str, seq: int) -> None:
        """Keep the position of a subscription."""
        ...

    async def remove(self, prefix: str) -> None:
        """Remove every queue and topic whose name begins so, with all that is known of it.

        Whatever is missing already does not matter: it may have been interrupted before.
        """
        ...

    async def close(self) -> None:
        """End what runs in the background."""
        ...


class HeldBlobs(Protocol):
    """The part of the hub's blobs that queues need."""

    def nbytes(self, sha256: str) -> int:
        """Return the size of a blob; HubError when it is not there."""
        ...

    def hold(self, connection: sqlite3.Connection, sha256: str, owner: str) -> None:
        """Keep a blob for an owner, inside a write; HubError when it is not there."""
        ...

    def drop(self, connection: sqlite3.Connection, owner: str) -> None:
        """Let go of an owner's blobs, inside a write."""
        ...

    def drop_all(self, connection: sqlite3.Connection, prefix: str) -> None:
        """Let go of the blobs of all owners whose names begin so, inside a write."""
        ...


def size_of(entry: QueueEntry) -> int:
    """Return the bytes of an item's payload, wherever they are."""
    return len(entry.payload) + entry.nbytes


def need_of(entries: Sequence[QueueEntry]) -> Amount:
    """Return the room that items need."""
    return Amount(len(entries), sum(map(size_of, entries)))


def retention_s(queue: str) -> float:
    """Return how long the keys of a queue's done items are remembered."""
    return INTERNAL_KEPT_S if queue.startswith(INTERNAL) else DONE_KEPT_S


def new_lease_mark() -> str:
    """Return what the leases of one claim have in common."""
    return secrets.token_hex(8)


def lease_name(seq: int, mark: str) -> str:
    """Return the name of one item's lease in a claim."""
    return f"{seq}.{mark}"


def lease_seq(lease: str) -> int:
    """Return which item a lease is of; -1 when the text is no lease."""
    number = lease.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1


def lease_lost(queue: str, lease: str) -> HubError:
    """Return the error for a lease that is not held any more."""
    return HubError(
        "this lease is not held any more",
        given=f"{lease!r} of queue {queue!r}",
        expected="a lease whose time has not ended",
        remedy="claim again; extend leases of long work before they end",
    )


def sum_moves(queue: str, source: ItemState, target: ItemState, sizes: Sequence[int]) -> list[Move]:
    """Return the move of items of these sizes, or nothing if there are none."""
    return [Move(queue, source, target, len(sizes), sum(sizes))] if sizes else []


def amounts_of(
    rows: Sequence[tuple[str, str, int, int]],
) -> dict[str, dict[str, Amount]]:
    """Return rows of queue, state, items, bytes as `Loaded.amounts`."""
    found: dict[str, dict[str, Amount]] = {}
    for queue, state, items, nbytes in rows:
        found.setdefault(queue, {})[state] = Amount(items, nbytes)
    return found


def no_attempts(queue: str) -> int:
    """Stand in until `Queues` sets the number of attempts."""
    return QueueOptions().max_attempts


def no_notifications(moves: Sequence[Move]) -> None:
    """Stand in until `Queues` listens."""
