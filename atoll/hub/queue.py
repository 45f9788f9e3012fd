"""The durable queue's contract: put once, lease, acknowledge; nothing acknowledged is lost.

An item is *ready*, *leased*, *done* or *dead*. A claim leases ready items in the order in which
they were put; an acknowledgement makes them done for good. A lease that ends without one gives the
item back, and an item given back too often becomes a dead letter, which nobody gets but everybody
can look at. Keys are remembered after the item is done, so a put that is sent again is accepted and
stored once. One object holds many named queues.

Leases end by the wall clock, because they outlive the process that gave them.
"""

from __future__ import annotations

import asyncio
import collections
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.errors import HubError
from atoll.wire.messages import QueueItem, QueuePutDone

MAX_ATTEMPTS = 5
"""Claims of one item before it becomes a dead letter."""

MAX_CLAIM = 1_000
"""Items in the answer to one claim."""

MAX_CLAIM_BYTES = 1 * 2**20
"""Payload bytes in the answer to one claim; a larger first item comes alone."""

MAX_WAIT_S = 60.0
"""Longest that one claim waits for its first item."""

DONE_KEPT_S = 7 * 86_400.0
"""How long the key of a done item is remembered."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many items of a queue are in which state."""

    ready: int = 0
    leased: int = 0
    dead: int = 0


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An item that was given back too often."""

    seq: int
    key: str
    payload: bytes
    attempts: int
    reason: str


class Queue(Protocol):
    """Named queues. Every method MUST be durable, where the backend is, before it returns."""

    async def put(self, queue: str, *, key: str, payload: bytes) -> QueuePutDone:
        """Store an item. The same `key` again is accepted and stored once."""
        ...

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
        ...

    async def ack(self, queue: str, *, lease: str) -> None:
        """Make a leased item done. Again: nothing happens.

        Raises:
            HubError: somebody else holds the item by now, or there never was such a lease.
        """
        ...

    async def extend(self, queue: str, *, lease: str, lease_s: float) -> None:
        """Let a lease end `lease_s` from now.

        Raises:
            HubError: the lease ended already.
        """
        ...

    async def release(self, queue: str, *, lease: str, reason: str = "") -> None:
        """Give an item back. Again: nothing happens.

        Raises:
            HubError: somebody else holds the item by now, or there never was such a lease.
        """
        ...

    async def expire(self) -> int:
        """Take back items whose lease ended and wake claims that wait; return how many."""
        ...

    async def depths(self) -> dict[str, Depth]:
        """Return how full each queue is; queues whose items are all done are left out."""
        ...

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """Return items that were given back too often, oldest first."""
        ...


class Waiters:
    """Claims that wait, in line per queue: one put wakes one of them, not all."""

    def __init__(self) -> None:
        self._lines: dict[str, collections.deque[asyncio.Future[None]]] = {}

    def wake(self, queue: str) -> None:
        """Wake the claim that has waited longest at this queue, if any."""
        line = self._lines.get(queue)
        while line:
            woken = line.popleft()
            if not woken.done():
                woken.set_result(None)
                return

    async def until_some(
        self,
        queue: str,
        attempt: Callable[[], Awaitable[list[QueueItem]]],
        *,
        limit: int,
        wait_s: float,
    ) -> list[QueueItem]:
        """Return what `attempt` finds, trying again at every wake-up until the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(wait_s, MAX_WAIT_S)
        more = True  # whoever leaves without having emptied the queue wakes the next in line
        woken: asyncio.Future[None] = loop.create_future()
        try:
            while True:
                # In line before looking: a put in between must find somebody to wake.
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


def new_lease(seq: int) -> str:
    """Return a fresh name for one claim of an item."""
    return f"{seq}.{secrets.token_hex(8)}"


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


def check_lease_time(lease_s: float) -> None:
    """Refuse leases that end before they begin.

    Raises:
        HubError: `lease_s` is not a positive, finite number of seconds.
    """
    if not 0 < lease_s < float("inf"):
        raise HubError("a lease must last", given=f"{lease_s} s", expected="more than 0 s")


def check_put(queue: str, key: str) -> None:
    """Refuse names that no queue or key may have.

    Raises:
        HubError: it is empty or longer than 200 characters.
    """
    for kind, name in (("queue", queue), ("key", key)):
        if not 0 < len(name) <= 200:
            raise HubError(
                f"this {kind} cannot be used",
                given=f"{len(name)} characters",
                expected="1 to 200 characters",
            )
