"""Unanswered requests of a link, by id."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

from atoll.errors import AtollError, from_dict
from atoll.wire.messages import Envelope, Failure, Message, pack


class PendingRequest:
    """An unanswered request."""

    __slots__ = ("frame", "future")

    def __init__(self, frame: bytes) -> None:
        self.frame = frame
        self.future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


class PendingRequests:
    """Numbers requests and matches answers to them."""

    def __init__(self) -> None:
        self.ids = itertools.count(1)
        """Ids of requests, heartbeats and Hellos."""
        self._pending: dict[int, PendingRequest] = {}

    @contextlib.contextmanager
    def pending(self, body: Message) -> Iterator[PendingRequest]:
        """Register a request; leaving the block withdraws it."""
        id = next(self.ids)
        self._pending[id] = pending = PendingRequest(pack(body, id=id))
        try:
            yield pending
        finally:
            del self._pending[id]

    def frames(self) -> list[bytes]:
        """Return the frames of unanswered requests, oldest first."""
        return [pending.frame for pending in self._pending.values() if not pending.future.done()]

    def resolve(self, envelope: Envelope) -> bool:
        """Complete a request with its answer; return False if no request waits for it."""
        pending = self._pending.get(envelope.id)
        if pending is None or pending.future.done():
            return False
        if isinstance(envelope.body, Failure):
            pending.future.set_exception(from_dict(envelope.body.error))
        else:
            pending.future.set_result(envelope.body)
        return True

    def fail(self, error: AtollError) -> None:
        """Raise the error in every waiting request."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(error)
