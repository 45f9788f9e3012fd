"""Messages between members through the hub, in pieces that its flow control lets pass.

Frames in flight are lost when a connection breaks. After a reconnect and after silence a sender
sends the last piece of a message again; the receiver repeats its answer, or says which pieces are
missing. If the receiver is not connected the hub says so, and the send fails at once.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field

from atoll.clock import RealClock
from atoll.errors import AtollError, HubError, PeerRefused, WireError
from atoll.group.peers.channel import (
    QUEUE_BYTES,
    MailQueue,
    PeerMail,
    SentBytes,
    no_room,
    too_late,
)
from atoll.ids import session_id
from atoll.net.dispatcher import Arrival, Reconnected, Relayed
from atoll.net.flow_control import peer_lost
from atoll.net.link import Parts
from atoll.net.sync_link import SyncLink
from atoll.wire.chunks import count_pieces
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Undeliverable
from atoll.wire.peer_pieces import (
    MAX_MESSAGE_BYTES,
    MOST_MISSING,
    PIECE,
    PeerPiece,
    PieceKind,
    pack_piece,
    unpack_piece,
)

log = logging.getLogger(__name__)

POLL_S = 0.25
"""Interval at which deadlines are checked."""
SILENCE_S, MAX_SILENCE_S = 2.0, 10.0
"""Time without an answer after which a sender asks; it doubles."""
ANSWER_S = 30.0
"""Time limit of sending an answer."""
UNFINISHED_S = 300.0
"""After so long without a new piece an unfinished message is dropped."""
ANSWERED = 4096
"""Answers that are remembered, to repeat them."""


@dataclass(slots=True)
class _Sending:
    to: str
    payload: memoryview
    head_bytes: int
    deadline: float
    timeout_s: float
    done: Future[None]
    relay: Future[int] | None = None
    ask_at: float = 0.0
    """When to ask for an answer, once all pieces have left."""
    silence_s: float = SILENCE_S


@dataclass(slots=True)
class _Unfinished:
    piece: PeerPiece
    data: bytearray
    have: set[int] = field(default_factory=set)
    since: float = 0.0


class RelayedChannel:
    """See the module's docstring, and :class:`PeerChannel`."""

    def __init__(self, link: SyncLink, *, job: str, most_bytes: int = QUEUE_BYTES) -> None:
        """Use a member's session; the link stays open when the channel is closed.

        At most `most_bytes` are under way, and as many wait to be received.
        """
        self._link, self._job, self._most_bytes = link, job, most_bytes
        self.queue = MailQueue(most_bytes)
        """Messages that have arrived."""
        # Another process of the same member must not reuse numbers that are remembered.
        self._numbers = itertools.count(secrets.randbits(48) << 8)
        self._changed = threading.Condition()  # around what senders and the reader change
        self._sending: dict[int, _Sending] = {}
        self._unfinished: dict[tuple[str, int], _Unfinished] = {}
        self._answers: OrderedDict[tuple[str, int], PeerPiece] = OrderedDict()
        self._sent_bytes = 0
        self._closed = False
        self._inbox = link.subscribe(notices=(Undeliverable,), reconnects=True, prefix=PIECE)
        self._thread = threading.Thread(target=self._read, name="peers", daemon=True)
        self._thread.start()

    @property
    def sent(self) -> SentBytes:
        """See :meth:`PeerChannel.sent`."""
        return SentBytes(relayed=self._sent_bytes)

    @property
    def dial(self) -> list[str]:
        """See :meth:`PeerChannel.dial`."""
        return []

    def reach(self, dials: Mapping[str, Sequence[str]]) -> None:
        """See :meth:`PeerChannel.reach`; the addresses are not used."""

    def send(
        self, to: str, head: bytes, data: Sequence[Buffer] = (), *, timeout_s: float
    ) -> Future[None]:
        """See :meth:`PeerChannel.send`."""
        clock, done = RealClock(), Future[None]()
        payload = memoryview(b"".join((head, *(memoryview(part).cast("B") for part in data))))
        if len(payload) > MAX_MESSAGE_BYTES:
            error = PeerRefused(
                "a message between members is too large", given=f"{len(payload)} bytes",
                expected=f"at most {MAX_MESSAGE_BYTES}", remedy="smaller microbatches",
            )  # fmt: skip
            done.set_exception(error)
            return done
        deadline = clock.monotonic() + timeout_s
        sending = _Sending(session_id(self._job, to), payload, len(head), deadline, timeout_s, done)
        with self._changed:
            self._changed.wait_for(lambda: self._has_room(len(payload)), timeout_s)
            failure = self._failure() or too_late(to, deadline, timeout_s)
            if failure is not None:
                done.set_exception(failure)
                return done
            number = next(self._numbers)
            self._sending[number] = sending
        self._start(number, sending, range(count_pieces(len(payload))))
        return done

    def receive(self, *, timeout_s: float) -> PeerMail | None:
        """See :meth:`PeerChannel.receive`."""
        return self.queue.get(timeout_s=timeout_s)

    def close(self) -> None:
        """See :meth:`PeerChannel.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._inbox.close()
        self._thread.join(ANSWER_S)

    # -------------------------------------------------------------------- sending

    def _has_room(self, nbytes: int) -> bool:
        """Return whether another message may start; called with the lock held."""
        under_way = sum(len(sending.payload) for sending in self._sending.values())
        room = not under_way or under_way + nbytes <= self._most_bytes
        return room or self._failure() is not None

    def _failure(self) -> AtollError | None:
        if self._closed:
            return HubError("this channel to other members is closed")
        return self._link.failed

    def _start(self, number: int, sending: _Sending, indices: Iterable[int]) -> None:
        def parts() -> Iterator[Parts]:
            payload = sending.payload
            for index in indices:
                piece = PeerPiece(
                    PieceKind.PART, number, index, sending.head_bytes, len(payload)
                )  # fmt: skip
                yield pack_piece(piece, payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])

        try:
            relay = self._link.relay_later(sending.to, parts(), deadline=sending.deadline)
        except AtollError as error:
            self._end(number, error)
            return
        sending.relay = relay
        sending.ask_at = RealClock().monotonic() + sending.silence_s

        def ended(relay: Future[int]) -> None:
            error = None if relay.cancelled() else relay.exception()
            if error is not None:
                self._end(number, error)

        relay.add_done_callback(ended)

    def _end(self, number: int, error: BaseException | None = None) -> None:
        with self._changed:
            sending = self._sending.pop(number, None)
            if sending is not None and error is None:
                self._sent_bytes += len(sending.payload)
            self._changed.notify_all()
        if sending is None:
            return
        if sending.relay is not None:
            sending.relay.cancel()
        try:
            if error is None:
                sending.done.set_result(None)
            else:
                sending.done.set_exception(error)
        except InvalidStateError:
            return

    def _pending(self, to: str = "") -> list[tuple[int, _Sending]]:
        with self._changed:
            return [(n, s) for n, s in self._sending.items() if to in ("", s.to)]

    # ------------------------------------------------------------------ receiving

    def _read(self) -> None:
        """Take arrivals until the channel is closed; never waits for a reader of messages."""
        clock = RealClock()
        try:
            while True:
                now = clock.monotonic()
                item = self._inbox.receive_now() or self._wait(now + POLL_S)
                if item is not None:
                    self._take(item)
                self._expire(clock.monotonic())
        except AtollError as error:
            failure = self._failure() or error
            for number, _ in self._pending():
                self._end(number, failure)
            self.queue.fail(failure)

    def _wait(self, until: float) -> Arrival | None:
        try:
            return self._inbox.receive(deadline=until)
        except AtollError:
            if self._failure() is not None:
                raise
            return None

    def _expire(self, now: float) -> None:
        for number, sending in self._pending():
            late = too_late(sending.to, sending.deadline, sending.timeout_s)
            if late is not None:
                self._end(number, late)
            elif sending.relay is not None and not sending.relay.done():
                sending.ask_at = now + sending.silence_s
            elif now >= sending.ask_at:
                sending.silence_s = min(MAX_SILENCE_S, 2 * sending.silence_s)
                self._start(number, sending, [count_pieces(len(sending.payload)) - 1])
        old = [k for k, found in self._unfinished.items() if now - found.since > UNFINISHED_S]
        for key in old:
            del self._unfinished[key]

    def _take(self, item: Arrival) -> None:
        if isinstance(item, Undeliverable):
            for number, _ in self._pending(item.to):
                self._end(number, peer_lost(item.to))
        elif isinstance(item, Reconnected):
            for _, sending in self._pending():
                sending.silence_s, sending.ask_at = SILENCE_S, 0.0
        elif isinstance(item, Relayed):
            try:
                piece, body = unpack_piece(item.payload)
            except WireError as error:
                log.warning("a piece from %s is not usable: %s", item.source, error)
                return
            if piece.kind is PieceKind.PART:
                self._store(item.source, piece, body)
            else:
                self._answered(item.source, piece)

    def _answered(self, source: str, piece: PeerPiece) -> None:
        with self._changed:
            sending = self._sending.get(piece.number)
        if sending is None or sending.to != source:
            return
        if piece.kind is PieceKind.MISSING:
            count = count_pieces(len(sending.payload))
            missing = [index for index in piece.missing if 0 <= index < count]
            self._start(piece.number, sending, missing)
            return
        refused = PeerRefused(piece.reason) if piece.kind is PieceKind.REFUSED else None
        self._end(piece.number, refused)

    def _store(self, source: str, piece: PeerPiece, body: memoryview) -> None:
        key, last = (source, piece.number), count_pieces(piece.total_bytes) - 1
        if key in self._answers:
            if piece.index == last:
                self._answer(key, self._answers[key])  # the first answer may be lost
            return
        found = self._unfinished.get(key)
        if found is None:
            coming = sum(len(other.data) for other in self._unfinished.values())
            if not self.queue.fits(coming + piece.total_bytes):
                member = self._link.session.rpartition("/")[2]
                refusal = no_room(member).message()
                self._answer(key, PeerPiece(PieceKind.REFUSED, piece.number, reason=refusal))
                return
            found = self._unfinished[key] = _Unfinished(piece, bytearray(piece.total_bytes))
        same = (found.piece.total_bytes, found.piece.head_bytes)
        if same != (piece.total_bytes, piece.head_bytes):
            log.warning("pieces of one message from %s contradict each other", source)
            return
        start = piece.index * CHUNK_BYTES
        found.data[start : start + len(body)] = body
        found.have.add(piece.index)
        found.since = RealClock().monotonic()
        if len(found.have) <= last and piece.index == last:
            missing = [index for index in range(last) if index not in found.have]
            lost = PeerPiece(PieceKind.MISSING, piece.number, missing=missing[:MOST_MISSING])
            self._reply(source, lost)
        elif len(found.have) == last + 1:
            del self._unfinished[key]
            whole = memoryview(found.data)
            member = source.removeprefix(session_id(self._job, ""))
            head = bytes(whole[: piece.head_bytes])
            self.queue.put(PeerMail(member, head, whole[piece.head_bytes :]))
            self._answer(key, PeerPiece(PieceKind.TAKEN, piece.number))

    def _answer(self, key: tuple[str, int], answer: PeerPiece) -> None:
        self._answers[key] = answer
        while len(self._answers) > ANSWERED:
            self._answers.popitem(last=False)
        self._reply(key[0], answer)

    def _reply(self, to: str, answer: PeerPiece) -> None:
        deadline = RealClock().monotonic() + ANSWER_S
        self._link.relay_later(to, iter([pack_piece(answer)]), deadline=deadline)
