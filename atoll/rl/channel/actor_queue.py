"""One actor's queue at the critic: prefetches, decodes, and holds items until they are saved."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import AtollError, DataError, HubError, LeaseEnded
from atoll.queues import Item, Queue
from atoll.rl.channel.latest import WAIT_S, Background
from atoll.rl.channel.names import LEASE_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One leased item: its content, or None if it is damaged, and when it was sent."""

    item: Item
    value: Any
    sent_at: float


class ActorQueue:
    """Prefetches the items of one actor.

    Args:
        queue: The actor's queue.
        decode: Returns the content of a message, and when it was sent; DataError drops it.
        ahead: Number of items to prefetch.
        most_held: Largest number of unsettled items.
        wake: Called when an item arrives.
    """

    def __init__(
        self,
        queue: Queue,
        *,
        decode: Callable[[Mapping[str, Any]], tuple[Any, float]],
        ahead: int,
        most_held: int,
        wake: Callable[[], None],
    ) -> None:
        self.damaged = 0
        self.empties = 0
        """How often a claim returned nothing."""
        self.received_at = time.monotonic()
        """Time of the last arrival, or of opening it."""
        self._queue, self._decode, self._wake = queue, decode, wake
        self._ahead, self._most = ahead, most_held
        self._condition = threading.Condition()
        self._line: collections.deque[Arrived] = collections.deque()
        self._held: list[Item] = []
        self._ended = False
        self._thread = Background(f"queue {queue.name}", self._fill)

    @property
    def depth(self) -> int:
        """Number of prefetched items."""
        return len(self._line)

    @property
    def held(self) -> list[Item]:
        """Items that were taken and not settled yet."""
        return list(self._held)

    def take(self) -> Arrived | None:
        """Return the next item, now held, or None."""
        with self._condition:
            if not self._line or len(self._held) >= self._most:
                return None
            arrived = self._line.popleft()
            self._held.append(arrived.item)
            self._condition.notify_all()
            return arrived

    def extend(self) -> None:
        """Renew the leases of all items."""
        with self._condition:
            items = [*self._held, *(arrived.item for arrived in self._line)]
        if items:
            try:
                self._queue.extend(items, lease_s=LEASE_S)
            except HubError as error:  # they are delivered again, and recognized by number
                log.warning("leases of %s have ended: %s", self._queue.name, error)

    def settle(self, leased: Sequence[Item]) -> None:
        """Acknowledge leased items, if they are still held.

        Raises:
            AtollError: the hub did not answer; they are still held.
        """
        with self._condition:
            items = [item for item in leased if item in self._held]
        if not items:
            return
        try:
            self._queue.ack(items)
        except LeaseEnded as error:
            log.warning("leases of %s had ended: %s", self._queue.name, error)
        with self._condition:
            self._held = [item for item in self._held if item not in items]
            self._condition.notify_all()

    def end(self) -> None:
        """Stop leasing after the current request."""
        self._thread.end()
        with self._condition:
            self._ended = True
            self._condition.notify_all()

    def close(self) -> None:
        """Stop leasing, and release the items that were not taken."""
        self.end()
        self._thread.close()
        self._release_line()

    def _fill(self) -> None:
        with self._condition:
            room = min(self._ahead, self._most - len(self._held)) - len(self._line)
            if room <= 0:
                self._condition.wait(WAIT_S)
                return
        items = self._queue.claim(room, lease_s=LEASE_S, wait_s=WAIT_S)
        for number, item in enumerate(items):
            try:
                arrived = self._open(item)
            except Exception:  # otherwise they would come again only when their leases end
                self._release(items[number:], "its content could not be fetched")
                raise
            with self._condition:
                self._line.append(arrived)
        self.empties += not items
        if items:
            self.received_at = time.monotonic()
            self._wake()
        if self._ended:  # the answer came late, and `close` may not have waited for it
            self._release_line()

    def _release_line(self) -> None:
        with self._condition:
            items = [arrived.item for arrived in self._line]
            self._line.clear()
        self._release(items, "the critic ends")

    def _release(self, items: Sequence[Item], reason: str) -> None:
        for item in items:
            try:
                item.release(reason)
            except AtollError as error:
                log.debug("could not release %s: %s", item.key, error)

    def _open(self, item: Item) -> Arrived:
        try:
            value, sent_at = self._decode(item.value)
        except DataError as error:
            self.damaged += 1
            log.warning("%s: %s", self._queue.name, error)
            return Arrived(item, None, 0.0)
        return Arrived(item, value, sent_at)
