"""Fetch from a donor over the hub's relay: a window of requests, repeated if frames were lost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded, WireError
from atoll.net.dispatcher import Reconnected, Relayed
from atoll.net.sync_link import SyncLink
from atoll.recovery.source import (
    SILENT_S,
    SourceAdvanced,
    SourceCorrupt,
    SourceFailed,
    Take,
    donor_refused,
)
from atoll.wire.messages import Undeliverable
from atoll.wire.recovery_messages import (
    ANSWERS,
    CHUNK,
    GONE,
    OK,
    WAIT,
    StateAnswer,
    StateAsk,
    pack_ask,
    unpack_answer,
)

WINDOW = 8
"""Chunks requested ahead: 2 MiB, which fills 160 Mbit/s at a round trip of 100 ms."""

RETRY_S = 3.0
"""Silence after which missing chunks are requested again."""

AWAY_S = 3.0
"""Time in which a donor may be unknown to the hub: after the hub's restart it reconnects."""

_SEND_S = 10.0
_POLL_S = 0.1


class RelaySource:
    """One donor, reached over this member's session with the hub."""

    def __init__(self, link: SyncLink, *, address: str) -> None:
        """Subscribe to answers of `address`, a session of the same job."""
        self._link, self._address = link, address
        self._clock = RealClock()
        self._numbers = itertools.count(1)
        self._closed = False
        self._last_received = self._clock.monotonic()
        self._gone_since: float | None = None
        self._retry_now = False
        self._inbox = link.subscribe(
            sources={address}, notices=(Undeliverable,), reconnects=True, prefix=ANSWERS
        )

    def ask(self, ask: StateAsk) -> tuple[StateAnswer, memoryview]:
        """Return the answer to one request; see :class:`Source`."""
        ask = StateAsk(next(self._numbers), ask.kind, ask.round, ask.image, ask.first, 1)
        self._send([ask])
        sent_at = self._last_received = self._clock.monotonic()
        while True:
            found = self._receive()
            if found is not None and found[0].number == ask.number:
                return found
            if self._retry_due(sent_at):
                sent_at = self._clock.monotonic()
                self._send([ask])

    def fetch(self, round_: int, image: str, indices: Sequence[int], take: Take) -> None:
        """Fetch chunks in any order; see :class:`Source`."""
        todo, in_flight = deque(indices), set[int]()
        sent_at = self._last_received = self._clock.monotonic()
        while todo or in_flight:
            ahead = [todo.popleft() for _ in range(min(len(todo), WINDOW - len(in_flight)))]
            if ahead:
                self._send(StateAsk(0, CHUNK, round_, image, index) for index in ahead)
                in_flight.update(ahead)
            found = self._receive()
            if found is not None:
                index = self._index_of(found[0], round_, image, in_flight)
                if index >= 0:
                    take(index, found[1])
                    in_flight.discard(index)
            elif self._retry_due(sent_at):
                sent_at = self._clock.monotonic()
                todo.extendleft(sorted(in_flight, reverse=True))
                in_flight.clear()

    def close(self) -> None:
        """End all waits."""
        self._closed = True
        self._inbox.close()

    def _index_of(self, answer: StateAnswer, round_: int, image: str, in_flight: set[int]) -> int:
        """Return the chunk index of an answer; -1: it is not awaited."""
        if answer.number != 0:
            return -1  # late, of an ask that was answered
        if answer.status in (GONE, WAIT):
            raise SourceAdvanced(answer.round)
        if answer.status != OK:
            raise donor_refused(answer)
        wanted = (answer.round, answer.image) == (round_, image) and answer.index in in_flight
        return answer.index if wanted else -1

    def _send(self, asks: Iterable[StateAsk]) -> None:
        """Send requests; lost ones are repeated after the silence that follows."""
        parts = [pack_ask(ask) for ask in asks]
        deadline = self._clock.monotonic() + _SEND_S
        try:
            self._link.relay_later(self._address, iter(parts), deadline=deadline)
        except AtollError as error:
            raise SourceFailed("the session with the hub ended", given=str(error)) from error

    def _receive(self) -> tuple[StateAnswer, memoryview] | None:
        """Return the next answer, or None after a moment; tracks silence."""
        try:
            item = self._inbox.receive(deadline=self._clock.monotonic() + _POLL_S)
        except DeadlineExceeded:
            item = None
        except AtollError as error:
            raise SourceFailed("the session with the hub ended", given=str(error)) from error
        now = self._clock.monotonic()
        if isinstance(item, Relayed):
            self._last_received, self._gone_since = now, None
            try:
                return unpack_answer(item.payload)
            except WireError as error:
                raise SourceCorrupt(error.message()) from error
        if isinstance(item, Reconnected):
            self._retry_now = True
        elif isinstance(item, Undeliverable) and item.to == self._address:
            self._gone_since = self._gone_since or now
        if not self._link.connected:
            self._last_received = now  # the donor is not silent while the hub is away
        self._check_alive(now)
        return None

    def _check_alive(self, now: float) -> None:
        """Raise if the donor is silent or gone."""
        if self._closed:
            raise SourceFailed("it is not needed any more")
        if self._gone_since is not None and now - self._gone_since > AWAY_S:
            raise SourceFailed("it is gone", given="it has no session at the hub")
        if now - self._last_received > SILENT_S:
            raise SourceFailed("it is silent", given=f"nothing for {SILENT_S:g} s")

    def _retry_due(self, sent_at: float) -> bool:
        """Return whether to repeat requests now."""
        now = self._clock.monotonic()
        retry_s = RETRY_S if self._gone_since is None else AWAY_S / 4
        if self._retry_now or now - max(sent_at, self._last_received) > retry_s:
            self._retry_now = False
            return True
        return False
