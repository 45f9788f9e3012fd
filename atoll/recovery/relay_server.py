"""Serve the donor's state over the hub's relay.

The relay connects members of one job only and verifies the sender. So the receiver is a member, and
its answer may include the key to the donor's own port.
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
"""Answers in flight to one receiver: 4 MiB, the hub's window of a pair."""

MAX_RECEIVERS = 16
SEND_S = 60.0
"""Time in which a chunk must reach its receiver."""

_POLL_S = 0.5

Sent = tuple[int, str, int]
"""Number of the request (0 for chunks), image and index."""


class RelayStateServer:
    """A thread that answers requests on a link, from its construction until `close`."""

    def __init__(self, answer: Answerer, *, link: SyncLink) -> None:
        """Subscribe and start.

        Args:
            answer: Called for every request.
            link: The member's session with the hub; other traffic is not affected.
        """
        self._answer, self._link = answer, link
        self._clock = RealClock()
        self._in_flight: dict[str, dict[Sent, Future[int]]] = {}
        self._closed = threading.Event()
        self._inbox = link.subscribe(prefix=ASKS)
        self._thread = threading.Thread(target=self._run, name="state-relay", daemon=True)
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
                log.warning("a request for the state was refused: %s", error)
            except AtollError as error:
                if not self._closed.is_set():
                    log.info("the state is no longer served through the hub: %s", error)
                return

    def _answer_ask(self, receiver: str, ask: StateAsk) -> None:
        """Answer a request, unless the same answer or too many are in flight."""
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
        """Forget finished answers; a receiver repeats lost requests."""
        for receiver in list(self._in_flight):
            unfinished = {k: f for k, f in self._in_flight[receiver].items() if not f.done()}
            if unfinished:
                self._in_flight[receiver] = unfinished
            else:
                del self._in_flight[receiver]
