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
        self._pending: dict[int, PendingRequest] = {}

    @contextlib.contextmanager
    def pending(self, body: Message) -> Iterator[PendingRequest]:
        """Give a request its number; leaving the block withdraws it."""
        id = next(self.ids)
        self._pending[id] = pending = PendingRequest(pack(body, id=id))
        try:
            yield pending
        finally:
            del self._pending[id]

    def frames(self) -> list[bytes]:
        """Return the frames of what is still to be answered, oldest first."""
        return [pending.frame for pending in self._pending.values() if not pending.future.done()]

    def resolve(self, envelope: Envelope) -> bool:
        """Hand an answer to its request; False: nobody waits for it (any more)."""
        pending = self._pending.get(envelope.id)
        if pending is None or pending.future.done():
            return False
        if isinstance(envelope.body, Failure):
            pending.future.set_exception(from_dict(envelope.body.error))
        else:
            pending.future.set_result(envelope.body)
        return True

    def fail(self, error: AtollError) -> None:
        """Answer everything with an error: no other answer can come any more."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)
