"""Send items to the hub in order and in batches, without blocking the producer.

Items put while a message is under way are collected for the next one. Each item is acknowledged
separately. The number of waiting items is bounded: a producer that is faster than the hub blocks
here, before memory fills.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from atoll.clock import Clock
from atoll.errors import AtollError, DeadlineExceeded, QueueFull
from atoll.queues.channel import Channel
from atoll.wire.messages import Message, QueueEntry, QueuePutManyDone

logger = logging.getLogger(__name__)

Acknowledged = concurrent.futures.Future[int]
"""Has the item's number once it is durable, or the error."""

CAPACITY_ITEMS = 10_000
CAPACITY_BYTES = 16 * 2**20
"""Limit of waiting items."""

BATCH_ITEMS = 500
BATCH_BYTES = 1 * 2**20
"""Limit of one message; a larger item is sent alone."""

ASK_S = 60.0
HUB_WAITS_S = 30.0
"""How long one message waits at the hub for room."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """One item on its way."""

    entry: QueueEntry
    deadline: float
    done: Acknowledged = field(default_factory=concurrent.futures.Future)

    @property
    def nbytes(self) -> int:
        return len(self.entry.payload) + len(self.entry.key) + 64


class Outbox:
    """Items on their way to one queue or topic. Any thread may add to it."""

    def __init__(
        self,
        channel: Channel,
        make_message: Callable[[list[QueueEntry], float], Message],
        *,
        clock: Clock,
    ) -> None:
        """Start empty.

        Args:
            channel: Sends the requests.
            make_message: Returns the request for some items and the time it may wait at the hub.
            clock: Source of time for deadlines.
        """
        self._channel = channel
        self._make_message = make_message
        self._clock = clock
        self._condition = threading.Condition()
        self._line: collections.deque[_Waiting] = collections.deque()
        self._nbytes = 0
        self._flight: list[_Waiting] = []
        self.configure(batch_items=BATCH_ITEMS, waits=False)

    def configure(self, *, batch_items: int, waits: bool) -> None:
        """Set the limit of one message, and whether a full queue is waited for.

        Args:
            batch_items: Most items of one message.
            waits: Whether to retry while the queue is full, until the item's deadline.
        """
        self._batch_items, self._waits = batch_items, waits
        self._most = batch_items
        """Items of the next message: fewer after one that did not fit."""

    def add(self, entry: QueueEntry, *, deadline: float) -> Acknowledged:
        """Add an item; block while too many are waiting.

        Raises:
            DeadlineExceeded: there was no room before `deadline`.
        """
        waiting = _Waiting(entry, deadline)
        with self._condition:
            while self._line and (
                len(self._line) >= CAPACITY_ITEMS or self._nbytes + waiting.nbytes > CAPACITY_BYTES
            ):
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    self._release(entry)
                    raise DeadlineExceeded(
                        "an item could not be sent in time",
                        given=f"{len(self._line)} items wait to be sent",
                        remedy="produce more slowly, or give the put more time",
                    )
                self._condition.wait(left_s)
            self._line.append(waiting)
            self._nbytes += waiting.nbytes
            batch = self._next_batch()
        self._send(batch)
        return waiting.done

    def flush(self, *, deadline: float) -> bool:
        """Wait until nothing is under way; return whether that was before `deadline`."""
        with self._condition:
            while self._line or self._flight:
                left_s = deadline - self._clock.monotonic()
                if left_s <= 0:
                    return False
                self._condition.wait(left_s)
        return True

    def _release(self, entry: QueueEntry) -> None:
        """Release the large payload of an item that is not stored."""
        if entry.blob:
            self._channel.release_large(entry.blob)

    def _next_batch(self) -> list[_Waiting]:
        """Take the next message's items if none is under way; call it with the lock held."""
        if self._flight:
            return []
        nbytes = 0
        while self._line and len(self._flight) < self._most:
            nbytes += self._line[0].nbytes
            if self._flight and nbytes > BATCH_BYTES:
                break
            waiting = self._line.popleft()
            self._nbytes -= waiting.nbytes
            self._flight.append(waiting)
        self._condition.notify_all()
        return list(self._flight)

    def _send(self, batch: list[_Waiting]) -> None:
        """Send a batch; the rest happens when the answer arrives."""
        while batch:  # in a loop, because a channel in memory has the answer at once
            future = self._ask(batch)
            if not future.done():
                future.add_done_callback(partial(self._continue, batch))
                return
            batch = self._answered(batch, future)

    def _continue(self, batch: list[_Waiting], future: concurrent.futures.Future[Message]) -> None:
        self._send(self._answered(batch, future))

    def _ask(self, batch: list[_Waiting]) -> concurrent.futures.Future[Message]:
        left_s = min(waiting.deadline for waiting in batch) - self._clock.monotonic()
        wait_s = max(0.0, min(left_s, HUB_WAITS_S)) if self._waits else 0.0
        message = self._make_message([waiting.entry for waiting in batch], wait_s)
        try:
            return self._channel.ask_later(message, timeout_s=ASK_S)
        except AtollError as error:
            failed: concurrent.futures.Future[Message] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed

    def _answered(
        self, batch: list[_Waiting], future: concurrent.futures.Future[Message]
    ) -> list[_Waiting]:
        """Process the answer to a batch; return the next one."""
        if future.cancelled():
            return self._settle(batch, AtollError("the link to the hub was closed"))
        error = future.exception()
        if error is not None:
            return self._settle(batch, error)
        answer = future.result()
        if isinstance(answer, QueuePutManyDone) and len(answer.seqs) == len(batch):
            self._most = min(self._batch_items, self._most * 2)
            return self._finish(batch, answer.seqs)
        return self._settle(batch, AtollError("the hub's answer is malformed", given=str(answer)))

    def _finish(self, batch: list[_Waiting], seqs: list[int]) -> list[_Waiting]:
        with self._condition:
            self._flight = []
            following = self._next_batch()
            self._condition.notify_all()
        for waiting, seq in zip(batch, seqs, strict=True):
            if waiting.done.set_running_or_notify_cancel():
                waiting.done.set_result(seq)
        return following

    def _settle(self, batch: list[_Waiting], error: BaseException) -> list[_Waiting]:
        """After a failure, decide which items to retry and which to fail; return the next batch.

        Resending is safe: an item's key prevents storing it twice.
        """
        failed = list(batch)
        if isinstance(error, QueueFull | DeadlineExceeded):
            if isinstance(error, QueueFull) and len(batch) > 1:
                self._most, failed = max(1, len(batch) // 2), []  # a smaller one may fit
            elif isinstance(error, DeadlineExceeded) or self._waits:
                now = self._clock.monotonic()
                failed = [waiting for waiting in batch if waiting.deadline <= now]
        again = [waiting for waiting in batch if waiting not in failed]
        with self._condition:
            self._flight = []
            self._line.extendleft(reversed(again))
            self._nbytes += sum(waiting.nbytes for waiting in again)
            following = self._next_batch()
            self._condition.notify_all()
        for waiting in failed:
            if isinstance(error, QueueFull):  # after other errors the item may be stored
                self._release(waiting.entry)
            if waiting.done.set_running_or_notify_cancel():
                waiting.done.set_exception(error)
        return following
