"""Tells people which requests were refused to whom and why, each once in a while."""

from __future__ import annotations

from atoll.clock import Clock
from atoll.errors import AtollError, AuthError, GroupError
from atoll.hub.events import Events
from atoll.hub.room import QUIET
from atoll.hub.session import Session
from atoll.wire.messages import Message

AGAIN_S = 30.0
"""The same refusal of the same member is told again after this time."""

MAX_KEPT = 1_000


class Refusals:
    """Writes `refused` events about members that asked for what they may not have."""

    def __init__(self, events: Events, *, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._told: dict[tuple[str, str, str], float] = {}

    async def note(self, session: Session, body: Message, error: AtollError) -> None:
        """Tell that a request was refused, if it was bad and not merely out of luck."""
        if not isinstance(error, GroupError | AuthError) or error.what in QUIET:
            return
        now, asked = self._clock.monotonic(), type(body).__name__
        key = (session.address, asked, error.what)
        if now - self._told.get(key, -AGAIN_S) < AGAIN_S:
            return
        if len(self._told) >= MAX_KEPT:
            self._told.clear()
        self._told[key] = now
        who = session.member or session.address
        text = f"{asked} of {who} is refused: {error.message()}"
        fields = {"message": asked, **error.to_dict()}
        await self._events.add(session.job, "refused", text, member=who, fields=fields)
