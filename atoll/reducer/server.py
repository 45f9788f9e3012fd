"""The reducer of one job: collects contributions, aggregates them, streams the result to members.

In an all-to-all it routes messages instead. A round may run several exchanges, its phases. One
thread processes what the hub delivers and never waits for a member; a second one computes sums;
results are sent by the link's event loop, one stream per member, so that a slow member does not
delay the others.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, DeadlineExceeded, EpochChanged, GroupError, WireError
from atoll.ids import session_id
from atoll.net.dispatcher import Reconnected, Relayed
from atoll.net.sync_link import SyncLink
from atoll.reducer.all_to_all import AllToAllMessages, Outgoing, open_outgoing
from atoll.reducer.assembly import MAX_CONTRIBUTION_BYTES
from atoll.reducer.combine import NormHistory, combine_readable
from atoll.reducer.looks import Looks
from atoll.reducer.mean import Mean, Share, minority, weighed
from atoll.reducer.memory import MemoryQuota, held_by_member
from atoll.reducer.parameter_server_endpoint import ParameterServerEndpoint
from atoll.reducer.phases import Epoch, Phase
from atoll.reducer.results import (
    ExchangeOutcome,
    in_slot_order,
    list_of_pieces,
    received,
    refusal,
    result_parts,
)
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, count_pieces, unpack_chunk
from atoll.wire.frames import Buffer
from atoll.wire.messages import Event, MemberLost, RoundPlan, Verdict
from atoll.wire.parameter_server_frames import is_server_frame

log = logging.getLogger(__name__)

AWAY_S = 60.0
"""Seconds without the hub after which a reducer exits; the hub starts another."""

_POLL_S = 0.5
"""How often `stop` and the connection are checked while the inbox is empty."""
_CLOSED_KEPT = 64
"""Decided epochs that are remembered, so that late pieces are not reported as errors."""


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
        limits: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """Serve as `job/reducer`; times are in seconds, and for `limits` see `MemoryQuota`."""
        self._link, self._job = link, job
        self._max_bytes, self._away_s = max_bytes, away_s
        self._clock = clock if clock is not None else RealClock()
        self._epochs: dict[int, Epoch] = {}
        # Guards the epochs and their phases: the summing thread registers streams in them.
        self._lock = threading.Lock()
        self._refused_epochs: dict[str, int] = {}
        """Member -> the last epoch in which an unexpected piece was answered with an error."""
        self._malformed_reported: dict[str, int] = {}
        """Member -> the newest epoch at the time of the last report of malformed pieces."""
        self._closed_epochs: deque[int] = deque(maxlen=_CLOSED_KEPT)
        self._norm_history, self._looks = NormHistory(), Looks()
        self._memory = MemoryQuota(limits, held=self._held)
        self._server: ParameterServerEndpoint | None = None
        # One thread: `NormHistory` is not thread-safe.
        self._summing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reducer-sum")
        self._inbox = link.subscribe(notices=(RoundPlan, MemberLost, Verdict), reconnects=True)

    def serve(self, *, stop: threading.Event) -> None:
        """Work until `stop` is set or the hub is unreachable for `away_s`.

        Raises:
            AtollError: the link failed permanently (a refused token, a replaced session).
        """
        last_seen = self._clock.monotonic()
        self._server = ParameterServerEndpoint(
            self._link, job=self._job, memory=self._memory, clock=self._clock
        )
        self._server.start()
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
            self._server.close()
            self._inbox.close()
            self._summing.shutdown(wait=False, cancel_futures=True)

    def figures(self) -> dict[str, float]:
        """Return the figures of a heartbeat; called on the link's event loop."""
        return self._memory.figures()

    def _held(self) -> Counter[str]:
        with self._lock:
            phases = [p for epoch in self._epochs.values() for p in list(epoch.phases.values())]
        return held_by_member(phases) + (self._server.held() if self._server else Counter())

    # ---------------------------------------------------------------------- intake

    def _handle(self, item: object) -> None:
        """Dispatch one item; malformed pieces are reported and dropped."""
        if isinstance(item, RoundPlan):
            self._open_epoch(item)
        elif isinstance(item, MemberLost):
            self._member_lost(item)
        elif isinstance(item, Verdict):
            self._close_epochs(item.group, lambda number: number <= item.epoch)
        elif isinstance(item, Reconnected):
            self._ask_all()
        elif isinstance(item, Relayed) and not is_server_frame(item.payload):
            job, _, member = item.source.rpartition("/")
            if job == self._job:
                try:
                    self._receive(member, *unpack_chunk(item.payload))
                except WireError as error:
                    self._drop_malformed(member, error)

    def _open_epoch(self, plan: RoundPlan) -> None:
        if plan.epoch in self._epochs:
            return
        # The hub has one open plan per group at a time: every older one is decided.
        self._close_epochs(plan.group, lambda number: number < plan.epoch)
        deadline = self._clock.monotonic() + plan.timeout_s
        with self._lock:
            self._epochs[plan.epoch] = Epoch(plan, deadline)

    def _close_epochs(self, group: int, which: Callable[[int], bool]) -> None:
        with self._lock:
            mine = [number for number, epoch in self._epochs.items() if epoch.plan.group == group]
            for number in filter(which, mine):
                self._closed_epochs.append(number)
                for phase in self._epochs.pop(number).phases.values():
                    phase.cancel()

    def _member_lost(self, notice: MemberLost) -> None:
        epoch = self._epochs.get(notice.epoch)
        if epoch is None or notice.job != self._job:
            return
        epoch.lost.add(notice.member)
        for phase in list(epoch.phases.values()):
            phase.assembly.drop(notice.member)
            self._compute_if_complete(epoch, phase)

    def _receive(self, member: str, head: ChunkHead, piece: memoryview) -> None:
        epoch = self._epochs.get(head.epoch)
        if epoch is not None and head.phase < epoch.released:
            return  # every member has the result of this exchange
        phase = self._phase(epoch, member, head) if epoch is not None else None
        if epoch is None or phase is None or member not in phase.assembly.members:
            self._refuse_unexpected(member, head)
        elif head.kind == "resume":
            self._resume(epoch, phase, member, head)
        elif head.kind == "contribute" and not phase.computing and member not in phase.refused:
            self._contribute(epoch, phase, member, head, piece)

    def _phase(self, epoch: Epoch, member: str, head: ChunkHead) -> Phase | None:
        """Return the exchange of a chunk; None if it cannot be under way."""
        if member not in epoch.plan.members or not epoch.may_begin(head.phase):
            return None
        with self._lock:
            if head.phase not in epoch.phases:
                epoch.open(
                    head.phase, all_to_all=head.codec == ALL_TO_ALL, max_bytes=self._max_bytes
                )
                epoch.deadline = self._clock.monotonic() + epoch.plan.timeout_s
            epoch.advance(member, head.phase)
            return epoch.phases[head.phase]

    def _contribute(
        self, epoch: Epoch, phase: Phase, member: str, head: ChunkHead, piece: memoryview
    ) -> None:
        try:
            if head.round != epoch.plan.round:
                raise WireError(
                    f"the contribution of {member} belongs to another round",
                    given=f"round {head.round}", expected=f"round {epoch.plan.round}",
                )  # fmt: skip
            self._memory.check(member, 0 if phase.assembly.started(member) else head.total_bytes)
            complete = phase.assembly.add(member, head, piece)
        except AtollError as error:
            self._refuse(epoch, phase, member, error)
            complete = True
        except Exception as error:  # whatever one member sends, the reducer goes on
            log.exception("a piece of %s cannot be used", member)
            unusable = WireError("a piece cannot be used", given=repr(error)[:200])
            self._refuse(epoch, phase, member, unusable)
            complete = True
        if complete:
            self._compute_if_complete(epoch, phase)
        if not phase.computing and phase.early.arrived():
            self._summing.submit(self._send_early, epoch, phase)

    def _refuse_unexpected(self, member: str, head: ChunkHead) -> None:
        """Answer a piece of an unknown exchange with an error, once per member and epoch."""
        if self._refused_epochs.get(member) == head.epoch:
            return
        self._refused_epochs[member] = head.epoch
        known = ", ".join(str(number) for number in self._epochs) or "none"
        error = EpochChanged(
            "the reducer does not expect this contribution",
            given=f"{member} in epoch {head.epoch}", expected=f"open epochs: {known}",
        )  # fmt: skip
        self._send_refusal(member, head.epoch, head.round, error, phase=head.phase)
        if head.epoch not in self._closed_epochs:
            self._report("contribution-refused", member, error)

    def _drop_malformed(self, member: str, error: WireError) -> None:
        """Drop a malformed piece; reported once per member and epoch."""
        log.warning("a piece from %s is not usable: %s", member, error)
        newest = max(self._epochs, default=-1)
        if self._malformed_reported.get(member) != newest:
            self._malformed_reported[member] = newest
            self._report("contribution-refused", member, error)

    def _refuse(self, epoch: Epoch, phase: Phase, member: str, error: AtollError) -> None:
        """Discard a member's contribution and report the error to the member and to the hub."""
        log.warning("refused %s in epoch %s: %s", member, epoch.plan.epoch, error)
        phase.refused[member] = error
        phase.assembly.refuse(member)
        self._send_refusal(member, epoch.plan.epoch, epoch.plan.round, error, phase=phase.number)
        self._report("contribution-refused", member, error)

    def _report(self, kind: str, member: str, error: AtollError) -> None:
        self._link.notify(Event(kind=kind, text=str(error), fields={"member": member}))

    # ------------------------------------------------------------------------ sums

    def _compute_if_complete(self, epoch: Epoch, phase: Phase) -> None:
        if phase.computing or phase.assembly.missing or not phase.assembly.shares():
            return
        phase.computing = True
        self._summing.submit(self._compute, epoch, phase)

    def _compute(self, epoch: Epoch, phase: Phase) -> None:
        """Aggregate the contributions and stream the result; runs on the summing thread."""
        try:
            phase.outcome = self._outcome(epoch, phase)
        except AtollError as error:
            phase.error = error
        except Exception as error:  # members wait for a result or an error in any case
            log.exception("the sum of epoch %s failed", epoch.plan.epoch)
            phase.error = WireError("the reducer failed", given=repr(error))
        for member in phase.assembly.members:
            if member not in epoch.lost and member not in phase.refused:
                self._deliver(epoch, phase, member, have=phase.early.sent)

    def _send_early(self, epoch: Epoch, phase: Phase) -> None:
        """Send what is known of a mean before all of it is; runs on the summing thread."""
        new = phase.early.pieces()
        if not new:
            return
        mean, plan = phase.early.mean(), epoch.plan
        with self._lock:
            if self._epochs.get(plan.epoch) is not epoch:
                return
            for member in set(phase.assembly.members) - epoch.lost - set(phase.refused):
                parts = result_parts(plan, mean, only=new, phase=phase.number, kind="early")
                to, until = session_id(self._job, member), epoch.deadline
                phase.early_streams.append(self._link.relay_later(to, parts, deadline=until))

    def _outcome(self, epoch: Epoch, phase: Phase) -> ExchangeOutcome:
        """Return the exchange's outcome; raises GroupError if no contribution is usable."""
        plan, shares = epoch.plan, phase.assembly.shares()
        if plan.verified and phase.number == 0:
            self._link.notify(received(plan, shares, self._looks.of(shares)))
        for member, error in minority(shares).items():
            self._refuse(epoch, phase, member, error)
        shares = weighed(shares, plan, refused=phase.refused)
        if not shares:
            raise GroupError("there is nothing to average", given="all were refused")
        if shares[0].packet.codec == ALL_TO_ALL:
            return ExchangeOutcome(plan, phase.number, self._route(epoch, phase, shares))
        mean = phase.early.whole(shares) or self._combine(epoch, phase, shares)
        for member, error in mean.refused.items():
            self._refuse(epoch, phase, member, error)
        for member, error in mean.left_out.items():
            log.warning("left %s out of epoch %s: %s", member, plan.epoch, error)
            self._report("contribution-left-out", member, error)
        return ExchangeOutcome(plan, phase.number, in_slot_order(mean, plan))

    def _combine(self, epoch: Epoch, phase: Phase, shares: list[Share]) -> Mean:
        """Return the aggregate; refuse members with packets that cannot be decoded."""
        mean, damaged = combine_readable(shares, memory=self._norm_history, round_=epoch.plan.round)
        for member, error in damaged.items():
            self._refuse(epoch, phase, member, error)
        if mean is None:
            raise GroupError("there is nothing to average", given="all were refused")
        return mean

    def _route(self, epoch: Epoch, phase: Phase, shares: list[Share]) -> AllToAllMessages:
        """Parse the messages of all members; refuse members that sent malformed ones."""
        outgoing: list[Outgoing] = []
        for share in shares:
            try:
                gift = open_outgoing(
                    share.member, share.packet.data, weight=share.weight,
                    members=epoch.plan.members,
                )  # fmt: skip
                outgoing.append(gift)
            except WireError as error:
                self._refuse(epoch, phase, share.member, error)
        return AllToAllMessages.of(outgoing)

    def _deliver(self, epoch: Epoch, phase: Phase, member: str, *, have: Iterable[int]) -> None:
        """Send a member the missing pieces of the result, or the error."""
        plan = epoch.plan
        if phase.error is not None:
            self._send_refusal(member, plan.epoch, plan.round, phase.error, phase=phase.number)
            return
        outcome = phase.outcome
        if outcome is None:
            return
        stream = phase.streams.get(member)
        if stream is not None and not stream.done():
            return  # if pieces are missing after this stream, the member sends another resume
        # Under the lock, so that an epoch closed meanwhile gets no stream that is never cancelled.
        with self._lock:
            if self._epochs.get(plan.epoch) is not epoch:
                return
            phase.streams[member] = self._link.relay_later(
                session_id(self._job, member), outcome.parts(member, skip=set(have)),
                deadline=epoch.deadline,
            )  # fmt: skip

    # -------------------------------------------------------------------- messages

    def _resume(self, epoch: Epoch, phase: Phase, member: str, head: ChunkHead) -> None:
        """Send the pieces that a member lacks, and list the received ones if it asks."""
        if member in phase.refused:
            self._send_refusal(
                member, head.epoch, head.round, phase.refused[member], phase=phase.number
            )
            return
        self._deliver(epoch, phase, member, have=head.have)
        if head.count:
            self._send_resume(epoch, phase, member, total_bytes=head.total_bytes, ask=False)

    def _send_resume(
        self, epoch: Epoch, phase: Phase, member: str, *, total_bytes: int, ask: bool
    ) -> None:
        have = phase.assembly.have(member)
        if phase.computing:  # report all pieces as received: none is needed any more
            have = list(range(count_pieces(phase.assembly.largest_bytes)))
        parts = list_of_pieces(epoch.plan, phase.number, have, total_bytes=total_bytes, ask=ask)
        self._send(member, parts, deadline=epoch.deadline)

    def _ask_all(self) -> None:
        """Resume every exchange after a reconnect: frames in flight are lost in both directions."""
        for epoch in list(self._epochs.values()):
            for phase in list(epoch.phases.values()):
                for member in phase.assembly.members:
                    if member in epoch.lost or member in phase.refused:
                        continue
                    # While the sum runs this makes the member ask for the result.
                    self._send_resume(epoch, phase, member, total_bytes=0, ask=True)
            next_phase = max(epoch.phases, default=-1) + 1
            if epoch.may_begin(next_phase):  # its first pieces may be among the lost frames
                parts = list_of_pieces(epoch.plan, next_phase, [], total_bytes=0, ask=True)
                for member in set(epoch.plan.members) - epoch.lost:
                    self._send(member, parts, deadline=epoch.deadline)

    def _send_refusal(
        self, member: str, epoch: int, round_: int, error: AtollError, *, phase: int
    ) -> None:
        parts, now = refusal(error, epoch, round_, phase=phase), self._clock.monotonic()
        self._send(member, parts, deadline=now + 30.0)

    def _send(self, member: str, parts: tuple[Buffer, Buffer], *, deadline: float) -> None:
        self._link.relay_later(session_id(self._job, member), iter([parts]), deadline=deadline)
