"""Events about rejected requests and connections, limited in rate."""

from __future__ import annotations

import logging
from collections import OrderedDict

from atoll.clock import Clock
from atoll.errors import AtollError, AuthError, GroupError
from atoll.hub.jobs.jobs import Jobs
from atoll.hub.observability.events import Events
from atoll.hub.rounds.runtime import QUIET
from atoll.hub.sessions.session import Session
from atoll.wire.messages import Message

logger = logging.getLogger(__name__)

REPEAT_S = 30.0
"""The same rejection of the same member is reported again after this time."""

MAX_KEPT = 1_000


class RejectionCounts:
    """Writes `refused` events about requests that a member had no right to make."""

    def __init__(self, events: Events, *, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._reported: dict[tuple[str, str, str], float] = {}

    async def note(self, session: Session, body: Message, error: AtollError) -> None:
        """Report a rejected request, unless the sender is not at fault."""
        if not isinstance(error, GroupError | AuthError) or error.what in QUIET:
            return
        now, kind = self._clock.monotonic(), type(body).__name__
        key = (session.address, kind, error.what)
        if now - self._reported.get(key, -REPEAT_S) < REPEAT_S:
            return
        if len(self._reported) >= MAX_KEPT:
            self._reported.clear()
        self._reported[key] = now
        who = session.member or session.address
        text = f"{kind} of {who} is refused: {error.message()}"
        fields = {"message": kind, **error.to_dict()}
        await self._events.add(session.job, "refused", text, member=who, fields=fields)


KIND = "refused"

PAUSE_S = 5.0
"""Seconds between two events about the same peer; rejections in between are counted."""

MAX_AT_ONCE = 20
"""Events about all peers within `PAUSE_S`, so that an attacker cannot fill the disk."""

_REMEMBERED = 1_024


class RejectionLog:
    """Writes an event for each connection closed for a protocol or authentication error."""

    def __init__(self, *, events: Events, jobs: Jobs, clock: Clock) -> None:
        self._events = events
        self._jobs = jobs
        self._clock = clock
        self._reported: OrderedDict[str, float] = OrderedDict()
        self._suppressed: dict[str, int] = {}
        self.count = 0

    async def note(self, who: str, error: AtollError, *, job: str = "", source: str = "") -> None:
        """Report a rejected connection of peer `who`, to the hub's log if `job` is not known."""
        self.count += 1
        now = self._clock.monotonic()
        name = who or source or "unknown client"
        if not self._may_report(name, now):
            self._suppressed[name] = self._suppressed.get(name, 0) + 1
            while len(self._suppressed) > _REMEMBERED:
                del self._suppressed[next(iter(self._suppressed))]
            return
        more = self._suppressed.pop(name, 0)
        fields = {**error.to_dict(), "from": source}
        if more:
            fields["more"] = str(more)
        again = f" (and {more} times before)" if more else ""
        logger.warning("%s was refused%s: %s", name, again, error)
        known = job if job and self._jobs.knows(job) else ""
        await self._events.add(
            known,
            KIND,
            f"{name} was refused: {error.what}{again}",
            member=who.partition("/")[2] if known else "",
            fields=fields,
        )

    def _may_report(self, name: str, now: float) -> bool:
        """Return whether an event about this peer is due, and record it as reported."""
        while self._reported and next(iter(self._reported.values())) <= now - PAUSE_S:
            self._reported.popitem(last=False)
        if name in self._reported or len(self._reported) >= MAX_AT_ONCE:
            return False
        self._reported[name] = now
        return True
