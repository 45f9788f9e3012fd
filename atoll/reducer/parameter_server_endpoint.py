"""The parameter server of a reducer process, as members reach it over the relay.

One thread receives asks, applies them and sends answers. Frames are lost when a connection breaks:
after a timeout members send a `look`, and the server answers with the pieces that it has of the
ask, or resends missing pieces of the answer. A member is lost when the hub has no session for it,
or when it is silent for much longer than usual.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from atoll.clock import Clock, RealClock
from atoll.codec.base import Packet
from atoll.errors import AtollError, DeadlineExceeded, LimitReached, WireError
from atoll.ids import session_id
from atoll.net.dispatcher import Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.memory import MemoryQuota
from atoll.reducer.parameter_server import Answers, ParameterServer, expected_sizes, working_bytes
from atoll.reducer.worker_clocks import WorkerState
from atoll.wire.chunks import count_pieces
from atoll.wire.messages import Event, Undeliverable
from atoll.wire.parameter_server_frames import (
    MARK,
    Pieces,
    ServerFrameHead,
    frames,
    pack_frame,
    unpack_frame,
)
from atoll.wire.parameter_server_messages import Answer, Ask, Attach, Load, pack_message, unpack_ask

log = logging.getLogger(__name__)

_POLL_S = 0.5  # interval of the checks for silent members
PING_S = 3.0
"""Silence after which the server pings a member: the hub answers if it has no session for it."""
LEASE_S = 180.0
"""Silence after which clocks stop waiting for a member, even if its connection is alive."""
LEASE_TIMES = 8.0
"""The same, as a multiple of the member's usual time between two asks, if that is longer."""
SEND_S = 300.0
MAX_BYTES = 16 * 2**30
_MEMBER = re.compile(r"w[0-9]{1,5}")
"""A name outside it would be remembered and pinged though no such member can exist."""


@dataclass(slots=True)
class _Client:
    """State of the exchange with one member."""

    last_received: float
    typical_s: float = 0.0
    """Decaying maximum of the seconds between two asks."""
    last_ask: float = 0.0
    last_ping: float = 0.0
    pieces: Pieces | None = None
    answered: int = -1
    answer: tuple[bytes, Packet | None] = (b"", None)
    received_call: int = -1
    """The last call received completely."""
    stream: Future[int] | None = field(default=None)
    sends: int = -1
    """The call that `stream` answers."""


class ParameterServerEndpoint:
    """Serves one job's members over a session with the hub."""

    def __init__(
        self, link: SyncLink, *, job: str, memory: MemoryQuota, clock: Clock | None = None
    ) -> None:
        """Subscribe to the asks of a job's members; `memory` refuses asks above its limits."""
        self._link, self._job, self._memory = link, job, memory
        self._clock = clock if clock is not None else RealClock()
        self.server = ParameterServer()
        self._clients: dict[str, _Client] = {}
        self._inbox = link.subscribe(notices=(Undeliverable,), prefix=MARK)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="parameter-server", daemon=True)

    def start(self) -> None:
        """Serve on a daemon thread until :meth:`close`."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._inbox.close()
        self._thread.join(timeout=5.0)

    def held(self) -> Counter[str]:
        """Return the bytes held of each member's asks, and under an empty name the state."""
        held = self.server.held()
        for member, client in list(self._clients.items()):
            pieces = client.pieces
            held[member] += pieces.total_bytes if pieces is not None else 0
        return +held

    def _serve(self) -> None:
        ticked = self._clock.monotonic()
        while not self._stop.is_set():
            now = self._clock.monotonic()
            if now - ticked >= _POLL_S:
                ticked = now
                self._tick(now)
            try:
                item = self._inbox.receive(deadline=now + _POLL_S)
            except DeadlineExceeded:
                continue
            except AtollError:  # the link or the inbox is closed
                return
            if isinstance(item, Undeliverable):
                self._undeliverable(item.to)
            elif isinstance(item, Relayed):
                self._receive(item)

    # ---------------------------------------------------------------------- intake

    def _receive(self, item: Relayed) -> None:
        """Process one frame; malformed frames are reported and dropped."""
        job, _, member = item.source.rpartition("/")
        if job != self._job:
            return
        now = self._clock.monotonic()
        client = self._clients.setdefault(member, _Client(last_received=now))
        client.last_received = now
        try:
            head, piece = unpack_frame(item.payload)
            if head.kind == "ask":
                self._receive_piece(member, client, head, piece)
            elif head.kind == "look":
                self._look(member, client, head)
        except WireError as error:
            log.warning("a frame from %s is not usable: %s", member, error)
            self._link.notify(
                Event(kind="contribution-refused", text=str(error), fields={"member": member})
            )
        except Exception:  # whatever one member sends, the server goes on for the others
            log.exception("a frame from %s cannot be used", member)

    def _receive_piece(
        self, member: str, client: _Client, head: ServerFrameHead, piece: memoryview
    ) -> None:
        """Store a piece of an ask, and handle the ask when it is complete."""
        if head.call <= client.received_call:
            return  # a duplicate; if the answer was lost, the member's `look` brings it
        if client.pieces is None or client.pieces.call != head.call:
            if head.index or (client.pieces is not None and client.pieces.call > head.call):
                return  # only piece 0 has the ask's head; the answer to a `look` requests it
            client.pieces = None  # an older ask, which no member waits for any more
            pieces, ask = _new_pieces(head)
            try:
                self._memory.check(member, pieces.total_bytes + working_bytes(ask))
            except LimitReached as error:
                client.received_call = head.call
                self._deliver([(member, Answer("refused", error=error.to_dict()), None)])
                return
            client.pieces = pieces
        if not client.pieces.put(head, piece) or not client.pieces.complete:
            return
        whole, client.pieces, client.received_call = client.pieces, None, head.call
        now = self._clock.monotonic()
        since_s = now - client.last_ask if client.last_ask else 0.0
        client.typical_s, client.last_ask = max(since_s, 0.9 * client.typical_s), now
        ask = unpack_ask(whole.body)
        sizes = tuple(expected_sizes(ask))
        codec = getattr(ask, "codec", "fp32")
        packet = Packet(whole.data, codec, sizes) if sizes else None
        try:
            answers = self.server.handle(member, ask, packet)
        except Exception as error:  # the member waits for an answer in any case
            log.exception("an ask of %s failed", member)
            failed = WireError("the parameter server failed", given=repr(error))
            answers = [(member, Answer("refused", error=failed.to_dict()), None)]
        self._deliver(answers)

    def _look(self, member: str, client: _Client, head: ServerFrameHead) -> None:
        """Resend the missing pieces of an answer, or list the pieces received of the ask."""
        if client.answered == head.call:
            self._send(member, client, skip=frozenset(head.have))
            return
        here = client.pieces
        have = sorted(here.have) if here is not None and here.call == head.call else []
        if client.received_call == head.call:
            have = list(range(min(head.count, count_pieces(MAX_BYTES))))
        self._send_head(member, ServerFrameHead("have", head.call, have=have))

    # --------------------------------------------------------------------- answers

    def _deliver(self, answers: Answers) -> None:
        """Send answers; each belongs to the member's last ask."""
        for member, answer, packet in answers:
            client = self._clients.get(member)
            if client is None or client.received_call < 0:
                continue
            client.answer, client.answered = (pack_message(answer), packet), client.received_call
            self._send(member, client, skip=frozenset())

    def _send(self, member: str, client: _Client, *, skip: frozenset[int]) -> None:
        streaming = client.stream is not None and not client.stream.done()
        if streaming and client.sends == client.answered:
            return  # if pieces are missing after this stream, the member sends another `look`
        client.sends = client.answered
        body, packet = client.answer
        parts = frames(
            "answer", client.answered, body, packet.data if packet is not None else b"", skip=skip
        )
        client.stream = self._link.relay_later(
            session_id(self._job, member), parts, deadline=self._clock.monotonic() + SEND_S
        )

    def _send_head(self, member: str, head: ServerFrameHead) -> None:
        self._link.relay_later(
            session_id(self._job, member), iter([pack_frame(head)]),
            deadline=self._clock.monotonic() + SEND_S,
        )  # fmt: skip

    # ------------------------------------------------------------------------ loss

    def _undeliverable(self, address: str) -> None:
        job, _, member = address.rpartition("/")
        if job == self._job:
            self._member_lost(member, "the hub has no session of it")

    def _member_lost(self, member: str, why: str) -> None:
        worker = self.server.clocks.workers.get(member)
        if worker is None or worker.state != WorkerState.LOST:
            log.warning("the parameter server no longer waits for %s: %s", member, why)
        self._deliver(self.server.lose(member))

    def _tick(self, now: float) -> None:
        """Ping silent members that others may wait for; treat those silent for too long as lost."""
        expected = self.server.expected
        for member in {*self.server.computing, *expected}:
            client = self._clients.setdefault(member, _Client(last_received=now))
            silent_s = now - client.last_received
            patient = self.server.setup.mode == "asynchronous" and member not in expected
            if not patient and silent_s > max(LEASE_S, LEASE_TIMES * client.typical_s):
                self._member_lost(member, f"it was silent for {silent_s:.0f} s")
            elif silent_s > PING_S and now - client.last_ping > PING_S:
                client.last_ping = now
                self._send_head(member, ServerFrameHead("ping", -1))


def _new_pieces(head: ServerFrameHead) -> tuple[Pieces, Ask]:
    """Return empty storage for the ask that a first piece announces, and the ask's head.

    Raises:
        WireError: it is too large, or names members that cannot exist.
    """
    ask = unpack_ask(head.body)
    named = ask.members if isinstance(ask, Attach | Load) else []
    if strange := [name for name in named if not _MEMBER.fullmatch(name)]:
        raise WireError("an ask names no members", given=strange[0][:100], expected="w0, w1, ...")
    most = min(MAX_BYTES, 8 * sum(expected_sizes(ask)) + 65_536)
    if min(expected_sizes(ask), default=0) < 0 or head.total_bytes > most:
        raise WireError(
            "an ask is too large", given=f"{head.total_bytes} bytes", expected=f"at most {most}"
        )
    # Pages are allocated when a piece is written, so a size that is only announced uses none.
    return Pieces(head.call, head.total_bytes, np.zeros(head.total_bytes, np.uint8).data), ask
