"""Asks to parameter servers over the relay, member's side.

Frames are lost when a connection breaks. After every reconnect, and after silence, the member lists
the pieces that it has of the answer; the server sends the others, or lists the pieces that it has
of the ask (none if it was restarted).
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

from atoll.clock import RealClock
from atoll.codec.base import Packet
from atoll.errors import AtollError, DeadlineExceeded, PeerLost, WireError
from atoll.group.base import Work
from atoll.group.in_process.servers import ServerRequest
from atoll.group.routes.relay import MAX_STALL_S, STALL_S, frame_overhead
from atoll.ids import reducer_id, session_id
from atoll.net.dispatcher import Inbox, Reconnected, Relayed
from atoll.net.sync_link import SyncLink
from atoll.wire.chunks import count_pieces
from atoll.wire.frames import Buffer
from atoll.wire.messages import Undeliverable
from atoll.wire.parameter_server_frames import (
    MARK,
    Pieces,
    ServerFrameHead,
    frames,
    is_server_frame,
    pack_frame,
    unpack_frame,
)
from atoll.wire.parameter_server_messages import Ask, pack_message, unpack_answer

log = logging.getLogger(__name__)

POLL_S = 0.25
SILENT_S = 45.0
"""Silence of a server, with the hub connected, after which it is given up."""
WHOLE_S = 3600.0
"""Longest duration of one ask: the slowest member of a clock may take that long."""

_MOST_BODY = 65_536  # the frame's head, which contains the body, has a two-byte length


class ParameterServerCalls:
    """All asks of one member; one may be pending for each server."""

    def __init__(self, link: SyncLink, *, job: str) -> None:
        self._link, self._job = link, job
        # Asks end on their own threads, and `fail` may come from any.
        self._lock = threading.Lock()
        self._next = time.time_ns()
        """Starts at the time, so that calls of a restarted process follow those of the previous
        one."""
        self._open: dict[int, tuple[Work[ServerRequest], threading.Event]] = {}
        self._ended: AtollError | None = None
        self.sent_bytes = 0
        self.received_bytes = 0

    def ask(self, ask: Ask, packet: Packet | None, *, server: int) -> Work[ServerRequest]:
        """Start an ask; see :meth:`Group.ask_server`."""
        work: Work[ServerRequest] = Work()
        gone = threading.Event()
        address, words = session_id(self._job, reducer_id(server)), pack_message(ask)
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._next += 1
            number = self._next
            call = _Call(self._link, address, number, words, packet, gone)
            self._open[number] = (work, gone)

        def body() -> None:
            try:
                found = call.run()
            except BaseException as error:  # any error is raised by `wait`
                self._book(number, call)
                work.fail(error)
            else:
                self._book(number, call)
                work.finish(found)

        threading.Thread(target=body, name=f"ask-server-{server}", daemon=True).start()
        return work

    def _book(self, number: int, call: _Call) -> None:
        with self._lock:
            self._open.pop(number, None)
            self.sent_bytes += call.sent_bytes
            self.received_bytes += call.received_bytes

    def fail(self, error: AtollError) -> None:
        """End all pending and later asks with an error."""
        with self._lock:
            self._ended = error
            under_way = list(self._open.values())
        for work, gone in under_way:
            work.fail(error)
            gone.set()


class _Call:
    """One ask and its answer."""

    def __init__(
        self,
        link: SyncLink,
        address: str,
        number: int,
        body: bytes,
        packet: Packet | None,
        gone: threading.Event,
    ) -> None:
        if len(body) >= _MOST_BODY - 1_024:
            raise WireError("an ask has too many words", given=f"{len(body)} bytes")
        self._link, self._to, self._number, self._gone = link, address, number, gone
        self._body, self._data = body, packet.data if packet is not None else b""
        self._count = count_pieces(len(self._data))
        self._clock = RealClock()
        self._answer: Pieces | None = None
        self._stream: Future[int] | None = None
        self._overhead = frame_overhead(address, link.session)
        self.sent_bytes = 0
        self.received_bytes = 0

    def run(self) -> ServerRequest:
        """Send the ask and return the answer.

        Raises:
            PeerLost: the hub has no session of the server.
            DeadlineExceeded: the server was silent for too long.
        """
        with self._link.subscribe(
            sources={self._to}, notices=(Undeliverable,), reconnects=True, prefix=MARK
        ) as inbox:
            try:
                self._send(frozenset())
                answer = self._receive(inbox)
            finally:
                if self._stream is not None:
                    self._stream.cancel()
        found = unpack_answer(answer.body)
        packet = Packet(answer.data, found.codec, tuple(found.sizes)) if found.codec else None
        return ServerRequest(found, packet, self.sent_bytes, self.received_bytes)

    # --------------------------------------------------------------------- sending

    def _send(self, skip: frozenset[int]) -> None:
        parts = frames("ask", self._number, self._body, self._data, skip=skip)
        self._stream = self._link.relay_later(
            self._to, map(self._counted, parts), deadline=self._clock.monotonic() + WHOLE_S
        )

    def _look(self) -> None:
        """List the pieces received of the answer."""
        have = sorted(self._answer.have) if self._answer is not None else []
        head = ServerFrameHead("look", self._number, count=self._count, have=have)
        self._link.relay_later(
            self._to, iter([self._counted(pack_frame(head))]),
            deadline=self._clock.monotonic() + SILENT_S,
        )  # fmt: skip

    def _counted(self, parts: tuple[bytes, Buffer]) -> tuple[bytes, Buffer]:
        self.sent_bytes += self._overhead + len(parts[0]) + len(parts[1])
        return parts

    @property
    def _sending(self) -> bool:
        return self._stream is not None and not self._stream.done()

    # ------------------------------------------------------------------- receiving

    def _receive(self, inbox: Inbox) -> Pieces:
        began = last_seen = looked = self._clock.monotonic()
        stall_s = STALL_S
        while self._answer is None or not self._answer.complete:
            now = self._clock.monotonic()
            self._check(now, began=began, last_seen=last_seen)
            if not self._link.connected:
                last_seen = now  # without the hub, silence says nothing about the server
            if not self._sending and now - max(last_seen, looked) >= stall_s:
                self._look()
                looked, stall_s = now, min(MAX_STALL_S, 2 * stall_s)
            try:
                item = inbox.receive(deadline=now + POLL_S)
            except DeadlineExceeded:
                continue
            if isinstance(item, Reconnected):
                self._look()
                looked = now
            elif self._handle(item):
                last_seen, stall_s = self._clock.monotonic(), STALL_S
        return self._answer

    def _check(self, now: float, *, began: float, last_seen: float) -> None:
        """Raise if the ask was withdrawn or a time limit has passed."""
        if self._gone.is_set():
            raise PeerLost("this ask was withdrawn", given=self._to)
        if now - began > WHOLE_S or (now - last_seen > SILENT_S and not self._sending):
            raise DeadlineExceeded(
                "a parameter server has been silent for too long",
                given=f"{self._to}, {now - last_seen:.0f} s",
            )

    def _handle(self, item: Any) -> bool:
        """Process one item; return whether it proves that the server is alive."""
        if isinstance(item, Undeliverable):
            if item.to == self._to:
                raise PeerLost("the hub has no session of a parameter server", given=self._to)
            return False
        if not isinstance(item, Relayed) or not is_server_frame(item.payload):
            return False
        self.received_bytes += frame_overhead(self._link.session, item.source) + len(item.payload)
        try:
            head, piece = unpack_frame(item.payload)
        except WireError as error:
            log.warning("a frame of %s is not usable: %s", self._to, error)
            return False
        if head.call != self._number:
            return head.kind == "ping"
        if head.kind == "have":
            missing = set(range(self._count)) - set(head.have)
            if missing and not self._sending:
                self._send(frozenset(head.have))
        elif head.kind == "answer":
            if self._answer is None:
                self._answer = Pieces(head.call, head.total_bytes, bytearray(head.total_bytes))
            self._answer.put(head, piece)
        return True
