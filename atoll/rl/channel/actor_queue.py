"""One actor's queue at the critic: leased ahead, decoded, and held until a saved state has it."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atoll.errors import AtollError, DataError, HubError
from atoll.queues import Item, Queue
from atoll.rl.channel.latest import WAIT_S, Background
from atoll.rl.channel.names import LEASE_S

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One leased item: what was in it, or None if that makes no sense, and when it was sent."""

    item: Item
    value: Any
    sent_at: float


class ActorQueue:
    """Leases what one actor has put, before it is asked for.

    Args:
        queue: The actor's.
        decode: Returns what is in a message, and when it was sent; DataError drops it.
        ahead: How much to lease before it is asked for.
        most_held: Holds at most so much that was not settled.
        wake: Called when something came.
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
        """How often the queue was asked and had nothing."""
        self.heard_at = time.monotonic()
        """When something came the last time, or when it was opened."""
        self._queue, self._decode, self._wake = queue, decode, wake
        self._ahead, self._most = ahead, most_held
        self._condition = threading.Condition()
        self._line: collections.deque[Arrived] = collections.deque()
        self._held: list[Item] = []
        self._thread = Background(f"queue {queue.name}", self._fill)

    @property
    def depth(self) -> int:
        """Items that may be taken at once."""
        return len(self._line)

    @property
    def held(self) -> list[Item]:
        """Items that were taken and not settled yet."""
        return list(self._held)

    def take(self) -> Arrived | None:
        """Return the next item, which is held from now on, or None."""
        with self._condition:
            if not self._line or len(self._held) >= self._most:
                return None
            arrived = self._line.popleft()
            self._held.append(arrived.item)
            self._condition.notify_all()
            return arrived

    def extend(self) -> None:
        """Renew the leases of everything that is here."""
        with self._condition:
            items = [*self._held, *(arrived.item for arrived in self._line)]
        if items:
            try:
                self._queue.extend(items, lease_s=LEASE_S)
            except HubError as error:  # they are delivered again, and known by their numbers
                log.warning("leases of %s have ended: %s", self._queue.name, error)

    def settle(self, taken: Sequence[Item]) -> None:
        """Acknowledge items that were taken, as far as they are held still.

        Raises:
            AtollError: the hub did not answer; they are still held.
        """
        with self._condition:
            items = [item for item in taken if item in self._held]
        if not items:
            return
        try:
            self._queue.ack(items)
        except HubError as error:
            if not _is_about_leases(error):
                raise
            log.warning("leases of %s had ended: %s", self._queue.name, error)
        with self._condition:
            self._held = [item for item in self._held if item not in items]
            self._condition.notify_all()

    def end(self) -> None:
        """Stop leasing after the question that is under way."""
        self._thread.end()
        with self._condition:
            self._condition.notify_all()

    def close(self) -> None:
        """Stop leasing, and give back what was not taken."""
        self.end()
        self._thread.close()
        with self._condition:
            items = [arrived.item for arrived in self._line]
            self._line.clear()
        for item in items:
            try:
                item.release("the critic ends")
            except AtollError as error:
                log.debug("could not give back %s: %s", item.key, error)

    def _fill(self) -> None:
        with self._condition:
            room = min(self._ahead, self._most - len(self._held)) - len(self._line)
            if room <= 0:
                self._condition.wait(WAIT_S)
                return
        items = self._queue.claim(room, lease_s=LEASE_S, wait_s=WAIT_S)
        for item in items:
            arrived = self._open(item)
            with self._condition:
                self._line.append(arrived)
        self.empties += not items
        if items:
            self.heard_at = time.monotonic()
            self._wake()

    def _open(self, item: Item) -> Arrived:
        try:
            value, sent_at = self._decode(item.value)
        except DataError as error:
            self.damaged += 1
            log.warning("%s: %s", self._queue.name, error)
            return Arrived(item, None, 0.0)
        return Arrived(item, value, sent_at)


def _is_about_leases(error: HubError) -> bool:
    """Return whether an answer says that leases are gone, not that the hub is."""
    return type(error) is HubError and "lease" in str(error)
