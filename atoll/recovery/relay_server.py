"""The donor's side of recovery through the hub: takes asks from relay frames, relays the answers.

The hub passes on frames between members of one job only, and checks who they are from; so whoever
asks here is one, and may be told the key to the donor's own port.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec

from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded, WireError
from atoll.net.dispatcher import Relayed
from atoll.net.sync_link import SyncLink
from atoll.recovery.http_server import Answerer
from atoll.wire.frames import Buffer
from atoll.wire.recovery_messages import ASKS, CHUNK, StateAsk, pack_answer, unpack_ask

log = logging.getLogger(__name__)

MAX_IN_FLIGHT = 16
"""Answers on the way to one asker: 4 MiB, which is what the hub holds for a pair anyway."""

MAX_RECEIVERS = 16
SEND_S = 60.0
"""Longest time that a chunk may wait for its asker."""

_POLL_S = 0.5

Sent = tuple[int, str, int]
"""Number of the ask, image and index; the number of a chunk does not count."""


class RelayStateServer:
    """A thread that answers what comes over a link, from its making until `close`."""

    def __init__(self, answer: Answerer, *, link: SyncLink) -> None:
        """Listen.

        Args:
            answer: Called for every ask.
            link: The member's session with the hub; its other traffic is not touched.
        """
        self._answer, self._link = answer, link
        self._clock = RealClock()
        self._in_flight: dict[str, dict[Sent, Future[int]]] = {}
        self._closed = threading.Event()
        self._inbox = link.subscribe(prefix=ASKS)
        self._thread = threading.Thread(target=self._run, name="state-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._closed.set()
        self._inbox.close()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _POLL_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                item = self._inbox.receive(deadline=self._clock.monotonic() + _POLL_S)
                if isinstance(item, Relayed):
                    self._answer_ask(item.source, unpack_ask(item.payload))
            except DeadlineExceeded:
                self._forget_finished()
            except WireError as error:
                log.warning("an ask for the state was refused: %s", error)
            except AtollError as error:
                if not self._closed.is_set():
                    log.info("the state is not given through the hub any more: %s", error)
                return

    def _answer_ask(self, receiver: str, ask: StateAsk) -> None:
        """Answer one ask, unless the same answer is under way or too many are."""
        self._forget_finished()
        sent = self._in_flight.get(receiver, {})
        what: Sent = (0 if ask.kind == CHUNK else ask.number, ask.image, ask.first)
        full = len(sent) >= MAX_IN_FLIGHT
        if what in sent or full or (not sent and len(self._in_flight) >= MAX_RECEIVERS):
            return  # it will ask again
        parts = pack_answer(*self._answer(msgspec.structs.replace(ask, count=1)))
        sent[what] = self._send(receiver, iter([parts]))
        self._in_flight[receiver] = sent

    def _send(self, receiver: str, parts: Iterator[tuple[Buffer, Buffer]]) -> Future[int]:
        deadline = self._clock.monotonic() + SEND_S
        return self._link.relay_later(receiver, parts, deadline=deadline)

    def _forget_finished(self) -> None:
        """Forget what has left, or never will: its asker asks again, or is gone."""
        for receiver in list(self._in_flight):
            remove_source = {k: f for k, f in self._in_flight[receiver].items() if not f.done()}
            if remove_source:
                self._in_flight[receiver] = remove_source
            else:
                del self._in_flight[receiver]
