"""The requests of a link that have no answer yet, by their numbers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

from atoll.errors import AtollError, from_dict
from atoll.wire.messages import Envelope, Failure, Message, pack


class PendingRequest:
    """A request that has no answer yet."""

    __slots__ = ("frame", "future")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class PendingRequests:
    """Numbers requests, and hands each answer to the one who asked."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        """Numbers of everything that is answered, heartbeats and greetings too."""
        self._asked: dict[int, PendingRequest] = {}

    @contextlib.contextmanager
    def asked(self, body: Message) -> Iterator[PendingRequest]:
        """Give a request its number; leaving the block withdraws it."""
        id = next(self.ids)
        self._asked[id] = asked = PendingRequest(pack(body, id=id))
        try:
            yield asked
        finally:
            del self._asked[id]

    def unanswered(self) -> list[bytes]:
        """Return the frames of what is still to be answered, oldest first."""
        return [asked.frame for asked in self._asked.values() if not asked.future.done()]

    def answered(self, envelope: Envelope) -> bool:
        """Hand an answer to its request; False: nobody waits for it (any more)."""
        asked = self._asked.get(envelope.id)
        if asked is None or asked.future.done():
            return False
        if isinstance(envelope.body, Failure):
            asked.future.set_exception(from_dict(envelope.body.error))
        else:
            asked.future.set_result(envelope.body)
        return True

    def fail(self, error: AtollError) -> None:
        """Answer everything with an error: no other answer can come any more."""
        for asked in self._asked.values():
            if not asked.future.done():
                asked.future.set_exception(error)
