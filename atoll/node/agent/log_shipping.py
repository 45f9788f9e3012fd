"""What processes print, on its way to the hub: one bounded queue per member, each line once.

Lines are numbered per member over all its attempts, because the hub keeps one count for each
member and agent. A member that has ended and whose lines have all arrived costs one number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from atoll.errors import AtollError, AuthError
from atoll.net.link import Link
from atoll.net.outbox import Outbox, drop_oldest
from atoll.wire.messages import Acked, LogLines, Message

log = logging.getLogger(__name__)

WAITING_LINES = 20_000
"""Lines of one process that wait while the hub is away; all of them are in its file anyway."""

Key = tuple[str, str]
"""Job and member."""


class _LineLink:
    """A link on which lines that the hub refuses count as told.

    They are of a process whose place another machine has taken; nobody wants them, ever.
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
        """Ship over a link that is connected already."""
        self._link = cast(Link, _LineLink(link))
        self._outboxes: dict[Key, Outbox[str]] = {}
        self._next: dict[Key, int] = {}
        """Number of the next line of a member that has no queue now."""
        self._using: dict[Key, int] = {}

    def __len__(self) -> int:
        """Return for how many members something is kept beside a number."""
        return len(self._outboxes)

    def open(self, key: Key) -> Callable[[str], None]:
        """Return where a new process of a member puts its lines, from any thread."""
        self._using[key] = self._using.get(key, 0) + 1
        if key not in self._outboxes:
            job, member = key
            self._outboxes[key] = Outbox(
                self._link,
                lambda seq, lines: LogLines(job, member, seq, lines),
                capacity=WAITING_LINES,
                thin=drop_oldest,
                first=self._next.get(key, 1),
            )
            self._outboxes[key].start()
        return self._outboxes[key].add

    async def flush(self, key: Key, *, timeout_s: float) -> bool:
        """Wait until the hub has all lines of a member so far; return whether it has."""
        outbox = self._outboxes.get(key)
        return outbox is None or await outbox.flush(timeout_s=timeout_s)

    async def end(self, key: Key, *, timeout_s: float) -> None:
        """A process of a member has ended: ship the rest, then forget what is not needed."""
        complete = await self.flush(key, timeout_s=timeout_s)
        self._using[key] -= 1
        if self._using[key] == 0 and complete:
            del self._using[key]
            outbox = self._outboxes.pop(key)
            self._next[key] = outbox.next_seq
            await outbox.close(timeout_s=0.0)

    async def close(self, *, timeout_s: float) -> None:
        """Ship what can be shipped in that time, then end."""
        outboxes = list(self._outboxes.values())
        await asyncio.gather(*(outbox.close(timeout_s=timeout_s) for outbox in outboxes))
