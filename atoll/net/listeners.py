"""Handlers of a link's events: notices, relayed payloads, reconnects, failure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from atoll.errors import AtollError
from atoll.wire.messages import Message

logger = logging.getLogger(__name__)


class Listeners:
    """Four lists of handlers, called in the order of registration; none may block."""

    def __init__(self) -> None:
        self.notices: list[Callable[[Message], None]] = []
        self.relays: list[Callable[[str, memoryview], None]] = []
        self.reconnects: list[Callable[[], None]] = []
        self.failures: list[Callable[[AtollError], None]] = []

    def noticed(self, body: Message) -> None:
        """Report a notice of the hub."""
        for handler in self.notices:
            _call(handler, body)

    def relayed(self, source: str, payload: memoryview) -> None:
        """Report a relayed payload."""
        for handler in self.relays:
            _call(handler, source, payload)

    def reconnected(self) -> None:
        """Report a reconnect."""
        for handler in self.reconnects:
            _call(handler)

    def failed(self, error: AtollError) -> None:
        """Report that the link has failed."""
        for handler in self.failures:
            _call(handler, error)


def _call(handler: Callable[..., None], *arguments: object) -> None:
    """Call a handler and log its exception, which must not end the session."""
    try:
        handler(*arguments)
    except Exception:
        logger.exception("a listener of the link to the hub failed")
