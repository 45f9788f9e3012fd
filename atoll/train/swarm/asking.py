"""A member's questions to the ledger, which holds its answers back until there are news."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from atoll.errors import AtollError
from atoll.train.swarm.parts import Answer, Ask
from atoll.wire.message import Message

log = logging.getLogger(__name__)

ASK_S = 60.0
"""Time limit of a question to the ledger, which holds answers back for a shorter time."""


class Asking:
    """Asks in the background; every answer, or the lack of one, becomes an event.

    For the member's own thread; of each kind of question it asks one at a time.
    """

    def __init__(self, me: str, ask: Ask, *, event: Callable[[Answer], None], most: int) -> None:
        """Ask up to `most` questions at a time; `event` takes events from any thread."""
        self._me, self._ask, self._event = me, ask, event
        self._pool = ThreadPoolExecutor(most, f"swarm-{me}")
        self._open: set[type[Message]] = set()

    def waits(self, kind: type[Message]) -> bool:
        """Return whether a question of this kind waits for its answer."""
        return kind in self._open

    def ask(self, body: Message) -> None:
        """Ask; the answer becomes an event."""
        self._open.add(type(body))

        def work() -> None:
            answer: Message | None = None
            try:
                answer = self._ask(body, timeout_s=ASK_S)
            except AtollError as error:  # also one of the hub's own, of any kind
                log.info("%s: %s was not answered: %s", self._me, type(body).__name__, error)
            self._event(Answer(body, answer))

        self._pool.submit(work)

    def answered(self, event: Answer) -> None:
        """Take note of an event, so that the next question of its kind can be asked."""
        self._open.discard(type(event.question))

    def close(self) -> None:
        """Ask nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
