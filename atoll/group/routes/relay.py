"""The relay route, member's side: send pieces to the reducer through the hub, receive the result.

The result is a mean, or in an all-to-all the packets for this member. Frames are lost when a
connection breaks. After every reconnect, and after silence, the member lists the pieces that it has
of the result and asks for the pieces that arrived of its contribution; both sides then send what is
missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from atoll.clock import RealClock
from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import AtollError, DeadlineExceeded, PeerLost, PeerRefused, WireError, from_dict
from atoll.group.collectives.collectives import Exchanged
from atoll.net.dispatcher import Inbox, Reconnected, Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.mean import Share, is_finite, is_weight, result_digest
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, count_pieces, pack_chunk, unpack_chunk
from atoll.wire.frames import HEADER_BYTES, Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import MemberLost, RoundPlan, Undeliverable

log = logging.getLogger(__name__)

STALL_S = 2.0
"""Silence after which the member sends a `resume`; doubles up to `MAX_STALL_S`."""
MAX_STALL_S = 10.0
SENDING_POLL_S = 0.25
"""How often a sending member checks whether its contribution has left."""
REDUCER = "reducer"
"""Name of the reducer in `MemberLost`."""
MAX_ALL_TO_ALL_BYTES = 64 * 2**30
"""Most bytes of messages that a member accepts in one all-to-all."""


@dataclass(slots=True)
class _Result:
    """The pieces received so far of the encoded mean."""

    head: ChunkHead
    data: bytearray
    have: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.have) == self.head.count

    def is_of(self, head: ChunkHead) -> bool:
        """Return whether a piece is one of this mean."""
        facts = ("codec", "sizes", "total_bytes", "count", "contributors", "weight")
        return all(getattr(head, name) == getattr(self.head, name) for name in facts)

    def put(self, head: ChunkHead, piece: memoryview) -> bool:
        """Store a piece; return whether it is new."""
        if head.index in self.have:
            return False
        start = head.index * CHUNK_BYTES
        self.data[start : start + len(piece)] = piece
        self.have.add(head.index)
        return True


@dataclass(frozen=True, slots=True)
class RelayedMean:
    """The reducer's answer."""

    packet: Packet
    """The encoded mean; in an all-to-all a table and its messages."""
    contributors: tuple[str, ...]
    weight: float
    sent_bytes: int
    received_bytes: int


def frame_overhead(to: str, source: str) -> int:
    """Return the bytes of a relay frame without its payload."""
    return HEADER_BYTES + 2 + len(to.encode()) + len(source.encode())


class RelayExchange:
    """One contribution to and one result from the reducer."""

    def __init__(
        self,
        link: SyncLink,
        plan: RoundPlan,
        share: Share,
        *,
        deadline: float,
        phase: int = 0,
        reducer_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare to send `share` to `plan.reducer` as exchange `phase`.

        `deadline` is monotonic. The share names its contributors if this member sends for its site.
        `reducer_lost` returns whether the hub reported that before this object subscribed.
        """
        packet = share.packet
        self._link, self._plan, self._packet = link, plan, packet
        self._deadline, self._reducer_lost = deadline, reducer_lost
        self._data = memoryview(packet.data)
        self._count = count_pieces(len(self._data))
        self._head = ChunkHead(
            kind="contribute", epoch=plan.epoch, round=plan.round, index=0, count=self._count,
            total_bytes=len(self._data), codec=packet.codec, sizes=list(packet.sizes),
            weight=share.weight, contributors=list(share.contributors or ()), phase=phase,
            aggregation=share.aggregation,
        )  # fmt: skip
        self._result: _Result | None = None
        self._early: _Result | None = None
        """Pieces that count if the result is of the same mean."""
        self._under_way: list[Future[int]] = []
        self._ask_when_sent = False
        self._overhead = frame_overhead(plan.reducer, link.session)
        self._sent_bytes = 0
        self._received_bytes = 0
        self._began = RealClock().monotonic()
        self.upload_s: float | None = None
        """Seconds until the contribution had left this machine."""

    def run(self) -> RelayedMean:
        """Send the contribution and return the result.

        Raises:
            PeerLost: the hub lost the reducer.
            EpochChanged: the reducer does not know this epoch.
            DeadlineExceeded: the result was not complete in time.
            PeerRefused: the result does not fit the plan or the contribution.
            GroupError: the reducer refused the contribution.
        """
        wanted = self._link.subscribe(
            sources={self._plan.reducer}, notices=(MemberLost, Undeliverable), reconnects=True
        )
        with wanted as inbox:
            try:
                self._send_pieces(range(self._count))
                self._receive_all(inbox)
            finally:
                for future in self._under_way:
                    future.cancel()
        result = self._result
        if result is None:
            raise WireError("the result of a round is empty")
        packet = Packet(result.data, result.head.codec, tuple(result.head.sizes))
        return RelayedMean(
            packet, tuple(result.head.contributors), result.head.weight,
            self._sent_bytes, self._received_bytes,
        )  # fmt: skip

    # ------------------------------------------------------------------- sending

    def _send_pieces(self, indices: Iterable[int]) -> None:
        def parts() -> Iterator[tuple[Buffer, Buffer]]:
            for index in indices:
                piece = self._data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
                yield self._counted(msgspec.structs.replace(self._head, index=index), piece)

        self._start(parts())

    def _send_resume(self, *, ask: bool) -> None:
        """List the pieces received of the result; with `ask`, request the reducer's list, too."""
        have = sorted(self._result.have) if self._result is not None else []
        head = msgspec.structs.replace(
            self._head, kind="resume", index=len(have), count=int(ask), have=have
        )
        self._start(iter([self._counted(head, b"")]))

    def _counted(self, head: ChunkHead, piece: Buffer) -> tuple[bytes, Buffer]:
        packed = pack_chunk(head, piece)
        self._sent_bytes += self._overhead + len(packed[0]) + len(piece)
        return packed

    def _start(self, parts: Iterator[tuple[Buffer, Buffer]]) -> None:
        self._under_way.append(
            self._link.relay_later(self._plan.reducer, parts, deadline=self._deadline)
        )

    def _sending(self) -> bool:
        """Return whether something is still being sent; after a failure a `resume` follows."""
        still: list[Future[int]] = []
        for future in self._under_way:
            if not future.done():
                still.append(future)
            elif not future.cancelled() and (error := future.exception()) is not None:
                if not isinstance(error, PeerLost | DeadlineExceeded):
                    raise error
                self._ask_when_sent = True
        self._under_way = still
        return bool(still)

    # ----------------------------------------------------------------- receiving

    def _receive_all(self, inbox: Inbox) -> None:
        clock = RealClock()
        stall_s, last = STALL_S, clock.monotonic()
        while self._result is None or not self._result.complete:
            if self._reducer_lost():
                raise PeerLost("the hub lost the reducer", given=self._plan.reducer)
            now = clock.monotonic()
            if now >= self._deadline:
                raise DeadlineExceeded(
                    "the reduce took too long",
                    given=f"{self._plan.timeout_s:.1f} s, {self._progress()}",
                )
            sending = self._sending()
            if not sending and self.upload_s is None:
                self.upload_s = now - self._began
            if not sending and (self._ask_when_sent or now - last >= stall_s):
                self._ask_when_sent = False
                self._send_resume(ask=True)
                stall_s, last = min(MAX_STALL_S, stall_s * 2), now
            pause_s = SENDING_POLL_S if sending else last + stall_s - now
            try:
                item = inbox.receive(deadline=min(self._deadline, now + max(0.01, pause_s)))
            except DeadlineExceeded:
                continue
            if self._handle(item):
                stall_s, last = STALL_S, clock.monotonic()

    def _progress(self) -> str:
        if self._result is None:
            return "no piece of the result arrived"
        return f"{len(self._result.have)} of {self._result.head.count} pieces of the result arrived"

    def _handle(self, item: object) -> bool:
        """Process one item; return whether it was progress."""
        if isinstance(item, Reconnected):
            self._ask_when_sent = True
        elif isinstance(item, MemberLost):
            if item.member == REDUCER and item.epoch == self._plan.epoch:
                raise PeerLost("the hub lost the reducer", given=self._plan.reducer)
        elif isinstance(item, Relayed):
            overhead = frame_overhead(self._link.session, item.source)
            self._received_bytes += overhead + len(item.payload)
            try:
                head, piece = unpack_chunk(item.payload)
            except WireError as error:
                # A damaged piece counts as lost: the next `resume` requests it again.
                log.warning("a chunk from the reducer is not usable: %s", error)
                return False
            return self._take(head, piece)
        return False

    def _take(self, head: ChunkHead, piece: memoryview) -> bool:
        if (head.epoch, head.phase) != (self._plan.epoch, self._head.phase):
            return False
        if head.kind == "refused":
            raise _refusal(piece)
        if head.kind == "resume":
            self._answer(head)
        elif head.kind == "result":
            if self._result is None and self._early is not None and self._early.is_of(head):
                self._result = self._early
            return self._store(head, piece)
        elif head.kind == "early":
            return self._store_early(head, piece)
        return False

    def _answer(self, head: ChunkHead) -> None:
        """Send the pieces that the reducer lacks, and list the received ones if it asks."""
        if self._sending():
            self._ask_when_sent = True
        else:
            have = set(head.have)
            missing = [index for index in range(self._count) if index not in have]
            if missing:
                self._send_pieces(missing)
        if head.count:
            self._send_resume(ask=False)

    def _store(self, head: ChunkHead, piece: memoryview) -> bool:
        """Store a piece of the result; the first one is checked against plan and contribution."""
        if self._result is None:
            self._check(head)
            self._result = _Result(head, bytearray(head.total_bytes))
        if not self._result.is_of(head):
            raise PeerRefused("pieces of one result contradict each other", given=str(head))
        return self._result.put(head, piece)

    def _store_early(self, head: ChunkHead, piece: memoryview) -> bool:
        """Store a piece that was sent before the whole result was known."""
        if self._result is not None:
            return self._result.is_of(head) and self._result.put(head, piece)
        if self._early is None or not self._early.is_of(head):
            self._check(head)
            self._early = _Result(head, bytearray(head.total_bytes))
        return self._early.put(head, piece)

    def _check(self, head: ChunkHead) -> None:
        """Raise PeerRefused if this cannot be the result of the plan's contributions."""
        sent, plan = self._head, self._plan
        all_to_all = sent.codec == ALL_TO_ALL
        limit = MAX_ALL_TO_ALL_BYTES
        total_bytes = min(head.total_bytes, limit) if all_to_all else sent.total_bytes
        if (head.codec, head.sizes, head.total_bytes) != (sent.codec, sent.sizes, total_bytes):
            what, given = "does not fit what was sent", f"{head.codec}, {head.total_bytes} bytes"
            expected = f"{sent.codec}, {total_bytes} bytes for {len(sent.sizes)} tensors"
        elif head.round != plan.round:
            what, given, expected = "is of another round", str(head.round), str(plan.round)
        else:
            check_contributors(plan, head.contributors)
            if not all_to_all:  # in which all weights may be 0
                check_weight(head.weight, len(head.contributors))
            return
        raise PeerRefused(f"the result of a round {what}", given=given, expected=expected)


def check_result(plan: RoundPlan, contributors: Sequence[str], weight: float) -> None:
    """Raise PeerRefused if the plan's contributions cannot have this result."""
    check_contributors(plan, contributors)
    check_weight(weight, len(contributors))


def check_contributors(plan: RoundPlan, contributors: Sequence[str]) -> None:
    """Raise PeerRefused unless these are some of the plan's members, in their order."""
    named = [member for member in plan.members if member in set(contributors)]
    if not named or named != list(contributors):
        raise PeerRefused(
            "the result of a round does not fit the plan",
            given=f"contributors {', '.join(contributors)}",
            expected=f"some of {', '.join(plan.members)}, in this order",
        )


def check_weight(weight: float, contributors: int) -> None:
    """Raise PeerRefused unless the weight is finite, positive and not too large for a mean."""
    if not (weight > 0 and is_weight(weight / contributors)):
        raise PeerRefused("the result of a round has no usable weight", given=weight)


def _refusal(piece: memoryview) -> AtollError:
    try:
        return from_dict(msgspec.msgpack.decode(piece, type=dict[str, str]))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return WireError("a refusal of the reducer is malformed", given=str(error))


def decode_mean(mean: RelayedMean, elements: int, *, sent: int, received: int) -> Exchanged:
    """Decode a mean of the reducer; raises PeerRefused for values or lengths that are wrong."""
    if mean.packet.num_elements != elements:  # before they are allocated
        raise PeerRefused(
            "the result of a round is not usable",
            given=f"{mean.packet.num_elements} values", expected=f"{elements} values",
        )  # fmt: skip
    try:
        vector = make_codec(mean.packet.codec).decode(mean.packet)
    except AtollError as error:
        raise PeerRefused("the result of a round cannot be decoded", given=str(error)) from error
    if not is_finite(vector):
        raise PeerRefused(
            "the result of a round is not usable",
            given=f"{elements} values, not all finite", expected=f"{elements} finite values",
        )  # fmt: skip
    digest = result_digest(mean.packet.data, mean.contributors)
    return Exchanged(vector, mean.contributors, mean.weight, digest, sent, received)
