"""The reducer of one job: collects contributions, averages them, streams the mean to everybody.

One thread takes in what the hub delivers and never waits for a member; sums are computed on a
second one; results go out through the link's own loop, one stream per member, so that a slow
member delays nobody else.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import msgspec

from atoll.clock import Clock, RealClock
from atoll.codec.table import make_codec
from atoll.errors import AtollError, DeadlineExceeded, EpochChanged, GroupError, WireError
from atoll.ids import session_id
from atoll.net.inbox import Reconnected, Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.assembly import MAX_CONTRIBUTION_BYTES, Assembly
from atoll.reducer.mean import Mean, mean_of, odd_ones
from atoll.wire.chunks import ChunkHead, count_pieces, pack_chunk, unpack_chunk
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Event, MemberLost, RoundPlan, Verdict

log = logging.getLogger(__name__)

AWAY_S = 60.0
"""Seconds without the hub after which a reducer ends; the hub starts another."""

_POLL_S = 0.5
_CLOSED_KEPT = 64
"""Epochs that are remembered after their verdict: late pieces of them are no surprise."""


@dataclass(slots=True)
class _Epoch:
    """One plan and what became of it."""

    plan: RoundPlan
    assembly: Assembly
    deadline: float
    lost: set[str] = field(default_factory=set)
    refused: dict[str, AtollError] = field(default_factory=dict)
    computing: bool = False
    mean: Mean | None = None
    error: AtollError | None = None
    streams: dict[str, Future[int]] = field(default_factory=dict)


class Reducer:
    """Serves one job over its session with the hub."""

    def __init__(
        self,
        link: SyncLink,
        *,
        job: str,
        max_bytes: int = MAX_CONTRIBUTION_BYTES,
        away_s: float = AWAY_S,
        clock: Clock | None = None,
    ) -> None:
        """Listen to everything the hub delivers to this session.

        Args:
            link: Session `job/reducer`.
            job: The job's id.
            max_bytes: Largest encoded vector taken from one member.
            away_s: Seconds without the hub after which :meth:`serve` returns.
            clock: Source of time.
        """
        self._link, self._job = link, job
        self._max_bytes, self._away_s = max_bytes, away_s
        self._clock = clock if clock is not None else RealClock()
        self._epochs: dict[int, _Epoch] = {}
        self._lock = threading.Lock()
        self._told: dict[str, int] = {}
        """Member -> the last epoch in which it was told that nobody waits for its pieces."""
        self._garbled: dict[str, int] = {}
        """Member -> the newest epoch when people were last told of its garbled pieces."""
        self._closed: deque[int] = deque(maxlen=_CLOSED_KEPT)
        self._workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reducer-sum")
        self._inbox = link.subscribe(notices=(RoundPlan, MemberLost, Verdict), reconnects=True)

    def serve(self, *, stop: threading.Event) -> None:
        """Work until `stop` is set, the link fails for good, or the hub stays away.

        Raises:
            AtollError: the link failed for good (a refused token, a replaced session).
        """
        last_seen = self._clock.monotonic()
        try:
            while not stop.is_set():
                now = self._clock.monotonic()
                if self._link.connected:
                    last_seen = now
                elif now - last_seen > self._away_s:
                    log.warning("the hub has been away for %.0f s; leaving", self._away_s)
                    return
                try:
                    item = self._inbox.receive(deadline=now + _POLL_S)
                except DeadlineExceeded:
                    continue
                self._handle(item)
        finally:
            self._inbox.close()
            self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def held_bytes(self) -> int:
        """Bytes of contributions held now."""
        with self._lock:
            return sum(epoch.assembly.nbytes for epoch in self._epochs.values())

    # ---------------------------------------------------------------------- intake

    def _handle(self, item: object) -> None:
        """Take one thing in; what a member sent wrong is its own trouble."""
        if isinstance(item, RoundPlan):
            self._open(item)
        elif isinstance(item, MemberLost):
            self._lose(item)
        elif isinstance(item, Verdict):
            self._forget(lambda number: number <= item.epoch)
        elif isinstance(item, Reconnected):
            self._ask_everybody()
        elif isinstance(item, Relayed):
            job, _, member = item.source.rpartition("/")
            if job == self._job:
                try:
                    self._take(member, *unpack_chunk(item.payload))
                except WireError as error:
                    self._unusable(member, error)

    def _open(self, plan: RoundPlan) -> None:
        """Expect contributions to an epoch; the same plan again changes nothing."""
        if plan.epoch in self._epochs:
            return
        # The hub has one open plan at a time: whatever is older was decided.
        self._forget(lambda number: number < plan.epoch)
        epoch = _Epoch(
            plan=plan,
            assembly=_assembly(plan, self._max_bytes),
            deadline=self._clock.monotonic() + plan.timeout_s,
        )
        with self._lock:
            self._epochs[plan.epoch] = epoch

    def _forget(self, which: Callable[[int], bool]) -> None:
        with self._lock:
            for number in [number for number in self._epochs if which(number)]:
                self._closed.append(number)
                for stream in self._epochs.pop(number).streams.values():
                    stream.cancel()

    def _lose(self, notice: MemberLost) -> None:
        epoch = self._epochs.get(notice.epoch)
        if epoch is None or notice.job != self._job:
            return
        epoch.lost.add(notice.member)
        epoch.assembly.drop(notice.member)
        self._compute_if_complete(epoch)

    def _take(self, member: str, head: ChunkHead, piece: memoryview) -> None:
        """Take one chunk of a member."""
        epoch = self._epochs.get(head.epoch)
        if epoch is None or member not in epoch.assembly.members:
            self._refuse_stranger(member, head)
        elif head.kind == "resume":
            self._resume(epoch, member, head)
        elif head.kind == "contribute" and not epoch.computing and member not in epoch.refused:
            self._contribute(epoch, member, head, piece)

    def _contribute(self, epoch: _Epoch, member: str, head: ChunkHead, piece: memoryview) -> None:
        try:
            if head.round != epoch.plan.round:
                raise WireError(
                    f"the contribution of {member} belongs to another round",
                    given=f"round {head.round}", expected=f"round {epoch.plan.round}",
                )  # fmt: skip
            complete = epoch.assembly.add(member, head, piece)
        except AtollError as error:
            self._refuse(epoch, member, error)
            complete = True
        if complete:
            self._compute_if_complete(epoch)

    def _refuse_stranger(self, member: str, head: ChunkHead) -> None:
        """Tell a member, once per epoch, that nobody waits for its pieces."""
        if self._told.get(member) == head.epoch:
            return
        self._told[member] = head.epoch
        known = ", ".join(str(number) for number in self._epochs) or "none"
        error = EpochChanged(
            "the reducer does not expect this contribution",
            given=f"{member} in epoch {head.epoch}", expected=f"open epochs: {known}",
        )  # fmt: skip
        self._send_refusal(member, head.epoch, head.round, error)
        if head.epoch not in self._closed:
            self._tell("contribution-refused", member, error)

    def _unusable(self, member: str, error: WireError) -> None:
        """Drop a piece that is no piece; people hear of it once per member and epoch."""
        log.warning("a piece from %s is not usable: %s", member, error)
        newest = max(self._epochs, default=-1)
        if self._garbled.get(member) != newest:
            self._garbled[member] = newest
            self._tell("contribution-refused", member, error)

    def _refuse(self, epoch: _Epoch, member: str, error: AtollError) -> None:
        """Wait for a member no more, tell it why, and tell the hub for people to see."""
        log.warning("refused %s in epoch %s: %s", member, epoch.plan.epoch, error)
        epoch.refused[member] = error
        epoch.assembly.refuse(member)
        self._send_refusal(member, epoch.plan.epoch, epoch.plan.round, error)
        self._tell("contribution-refused", member, error)

    def _tell(self, kind: str, member: str, error: AtollError) -> None:
        self._link.notify(Event(kind=kind, text=str(error), fields={"member": member}))

    # ------------------------------------------------------------------------ sums

    def _compute_if_complete(self, epoch: _Epoch) -> None:
        """Start the sum when no live member's contribution is missing."""
        if epoch.computing or epoch.assembly.missing or not epoch.assembly.shares():
            return
        epoch.computing = True
        self._workers.submit(self._compute, epoch)

    def _compute(self, epoch: _Epoch) -> None:
        """Average, then stream the result; runs on the summing thread."""
        try:
            shares = epoch.assembly.shares()
            for member, error in odd_ones(shares).items():
                self._refuse(epoch, member, error)
            shares = [share for share in shares if share.member not in epoch.refused]
            if not shares:
                raise GroupError("there is nothing to average", given="all were refused")
            epoch.mean = _in_slot_order(
                mean_of(shares, codec=make_codec(shares[0].packet.codec)), epoch.plan
            )
            for member, error in epoch.mean.left_out.items():
                log.warning("left %s out of epoch %s: %s", member, epoch.plan.epoch, error)
                self._tell("contribution-left-out", member, error)
        except AtollError as error:
            epoch.error = error
        except Exception as error:  # members must hear of it, whatever it is
            log.exception("the sum of epoch %s failed", epoch.plan.epoch)
            epoch.error = WireError("the reducer failed", given=repr(error))
        for member in epoch.assembly.members:
            if member not in epoch.lost and member not in epoch.refused:
                self._deliver(epoch, member, have=())

    def _deliver(self, epoch: _Epoch, member: str, *, have: Iterable[int]) -> None:
        """Send a member the pieces of the result that it lacks, or why there is none."""
        plan = epoch.plan
        if epoch.error is not None:
            self._send_refusal(member, plan.epoch, plan.round, epoch.error)
            return
        mean = epoch.mean
        if mean is None:
            return
        stream = epoch.streams.get(member)
        if stream is not None and not stream.done():
            return  # it asks again if something is still missing after this stream
        with self._lock:
            if self._epochs.get(plan.epoch) is not epoch:
                return
            epoch.streams[member] = self._link.relay_later(
                session_id(self._job, member), result_parts(plan, mean, skip=set(have)),
                deadline=epoch.deadline,
            )  # fmt: skip

    # -------------------------------------------------------------------- messages

    def _resume(self, epoch: _Epoch, member: str, head: ChunkHead) -> None:
        """A member says what it has: send what it lacks, and answer if it asks."""
        if member in epoch.refused:
            self._send_refusal(member, head.epoch, head.round, epoch.refused[member])
            return
        self._deliver(epoch, member, have=head.have)
        if head.count:
            self._send_resume(epoch, member, total_bytes=head.total_bytes, ask=False)

    def _send_resume(self, epoch: _Epoch, member: str, *, total_bytes: int, ask: bool) -> None:
        have = epoch.assembly.have(member)
        if epoch.computing:  # nothing more is wanted, whatever was or was not received
            have = list(range(count_pieces(epoch.assembly.largest_bytes)))
        head = ChunkHead(
            kind="resume", epoch=epoch.plan.epoch, round=epoch.plan.round, index=len(have),
            count=int(ask), total_bytes=total_bytes, codec="", sizes=[], weight=0.0, have=have,
        )  # fmt: skip
        self._send(member, pack_chunk(head), deadline=epoch.deadline)

    def _ask_everybody(self) -> None:
        """After a reconnect: frames in flight were lost in both directions."""
        for epoch in list(self._epochs.values()):
            for member in epoch.assembly.members:
                if member in epoch.lost or member in epoch.refused:
                    continue
                # Once the sum runs only the member's answer matters: it brings the result again.
                self._send_resume(epoch, member, total_bytes=0, ask=True)

    def _send_refusal(self, member: str, epoch: int, round_: int, error: AtollError) -> None:
        piece = msgspec.msgpack.encode(error.to_dict())[:CHUNK_BYTES]
        head = ChunkHead(
            kind="refused", epoch=epoch, round=round_, index=0, count=1,
            total_bytes=len(piece), codec="", sizes=[], weight=0.0,
        )  # fmt: skip
        self._send(member, pack_chunk(head, piece), deadline=self._clock.monotonic() + 30.0)

    def _send(self, member: str, parts: tuple[Buffer, Buffer], *, deadline: float) -> None:
        self._link.relay_later(session_id(self._job, member), iter([parts]), deadline=deadline)


def _assembly(plan: RoundPlan, max_bytes: int) -> Assembly:
    """Return what waits for the contributions to a plan: of all members, or of one per site."""
    sites = {site[0]: tuple(site) for site in plan.sites if site and plan.route == "hierarchical"}
    return Assembly(list(sites) or plan.members, sites=sites, max_bytes=max_bytes)


def _in_slot_order(mean: Mean, plan: RoundPlan) -> Mean:
    """Return a mean whose contributors are in the order of the plan, whoever spoke for them."""
    named = set(mean.contributors)
    return replace(mean, contributors=tuple(m for m in plan.members if m in named))


def result_parts(plan: RoundPlan, mean: Mean, *, skip: set[int]) -> Iterator[tuple[Buffer, Buffer]]:
    """Yield the pieces of a result as parts of relay frames, without those in `skip`."""
    data = memoryview(mean.packet.data)
    count = count_pieces(len(data))
    head = ChunkHead(
        kind="result", epoch=plan.epoch, round=plan.round, index=0, count=count,
        total_bytes=len(data), codec=mean.packet.codec, sizes=list(mean.packet.sizes),
        weight=mean.weight, contributors=list(mean.contributors),
    )  # fmt: skip
    for index in range(count):
        if index not in skip:
            piece = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            yield pack_chunk(msgspec.structs.replace(head, index=index), piece)
