"""Output of processes on its way to the hub: one bounded queue per member, each line once.

The hub drops lines with numbers that it has already stored of a member and agent. So each queue
begins above all numbers of earlier ones: gaps are allowed, and no count per member has to be kept.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import cast

from atoll.errors import AtollError, AuthError
from atoll.net.link import Link
from atoll.net.outbox import Outbox, drop_oldest
from atoll.wire.messages import Acked, LogLines, Message

log = logging.getLogger(__name__)

WAITING_LINES = 20_000
"""Lines of one process that wait while the hub is unreachable; its output file has all of them."""
GATHER_S = 0.05
"""How long lines are collected: at most 20 messages a second, instead of one for each line."""

Key = tuple[str, str]


class _LineLink:
    """A link on which lines that the hub refuses count as shipped.

    They come from a process that was replaced on another machine, and are never wanted again.
    """

    def __init__(self, link: Link) -> None:
        self._link = link

    @property
    def session(self) -> str:
        return self._link.session

    @property
    def failed(self) -> AtollError | None:
        return self._link.failed

    async def request(self, body: Message, *, timeout_s: float) -> Message:
        try:
            return await self._link.request(body, timeout_s=timeout_s)
        except AuthError as error:
            if self._link.failed is not None or not isinstance(body, LogLines):
                raise
            log.info("lines of %s %s are dropped: %s", body.job, body.member, error)
            return Acked(body.seq + len(body.lines) - 1)


class LogShipper:
    """Ships the lines of every process of one agent."""

    def __init__(self, link: Link) -> None:
        self._link = cast(Link, _LineLink(link))
        self._outboxes: dict[Key, Outbox[str]] = {}
        self._first = 1
        """Above the numbers of all queues that were dropped."""
        self._using: dict[Key, int] = {}
        """Processes of each member with a queue that have not ended."""
        self._dropping: set[asyncio.Task[None]] = set()
        """Drop queues of ended processes once the hub has their lines."""

    def __len__(self) -> int:
        """Return the number of members with a queue."""
        return len(self._outboxes)

    def open(self, key: Key) -> Callable[[str], None]:
        """Return a thread-safe function that adds lines of a new process of a member."""
        self._using[key] = self._using.get(key, 0) + 1
        if key not in self._outboxes:
            job, member = key
            self._outboxes[key] = Outbox(
                self._link,
                lambda seq, lines: LogLines(job, member, seq, lines),
                capacity=WAITING_LINES,
                thin=drop_oldest,
                first=self._first,
                gather_s=GATHER_S,
            )
            self._outboxes[key].start()
        return self._outboxes[key].add

    async def flush(self, key: Key, *, timeout_s: float) -> bool:
        """Wait until the hub has all lines of a member; return whether it has."""
        outbox = self._outboxes.get(key)
        return outbox is None or await outbox.flush(timeout_s=timeout_s)

    async def end(self, key: Key, *, timeout_s: float) -> None:
        """A process of a member has ended: ship the rest, then drop an unused queue.

        What the hub has not taken in time is shipped later.
        """
        complete = await self.flush(key, timeout_s=timeout_s)
        self._using[key] -= 1
        if complete:
            await self._drop_unused(key)
        else:
            task = asyncio.create_task(self._drop_when_shipped(key), name="lines-drop")
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop_when_shipped(self, key: Key) -> None:
        await self.flush(key, timeout_s=math.inf)  # ends early if the link has failed for good
        await self._drop_unused(key)

    async def _drop_unused(self, key: Key) -> None:
        """Drop a member's queue, unless a newer process uses it or it was dropped before."""
        if self._using.get(key) == 0:
            del self._using[key]
            outbox = self._outboxes.pop(key)
            self._first = max(self._first, outbox.next_seq)
            await outbox.close(timeout_s=0.0)

    async def close(self, *, timeout_s: float) -> None:
        """Ship what is possible in that time, then stop."""
        for task in self._dropping:
            task.cancel()
        outboxes = list(self._outboxes.values())
        await asyncio.gather(*(outbox.close(timeout_s=timeout_s) for outbox in outboxes))
