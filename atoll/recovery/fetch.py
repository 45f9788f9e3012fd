"""One attempt to fetch the state of one round from several sources at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.clock import RealClock
from atoll.errors import AtollError, DeadlineExceeded, GroupLeft
from atoll.ids import slot_of
from atoll.net.sync_link import SyncLink
from atoll.recovery.chunk_scheduler import ChunkScheduler, Progress
from atoll.recovery.donor_session import DonorSession, ask_order
from atoll.recovery.partial_state import PartialState
from atoll.recovery.source import SourceAdvanced, SourceCorrupt, SourceDiffers
from atoll.wire.messages import Event, Sources

log = logging.getLogger(__name__)

COMPARE_S = 0.5
"""Time after the first report in which other donors may report a different image."""

_POLL_S = 0.1
_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Recipient:
    """The member that fetches the state."""

    link: SyncLink
    """Its session with the hub."""
    job: str
    me: str
    """Its own id."""
    on_event: Callable[[Event], None]
    """Takes events for people; called from several threads."""
    stop: Callable[[], bool] = lambda: False
    """Polled; True: give up."""
    progress: Progress | None = None
    """Takes the bytes that have arrived, and the bytes in all."""


@dataclass(slots=True)
class Fetch:
    """One attempt; use it once, from one thread."""

    recipient: Recipient
    answer: Sources
    deadline: float
    """Monotonic time at which to give up."""
    kept: PartialState | None = None
    """Shared image of an earlier attempt, or of an earlier round."""
    with_inner: bool = True
    """Whether the optimizer state of a donor is needed."""
    failed: dict[str, str] = field(default_factory=dict, init=False)
    """Dropped donors, with the reason."""
    differing: set[str] = field(default_factory=set, init=False)
    """Dropped donors that only differ from the majority; they may be right."""
    scheduler: ChunkScheduler = field(init=False)
    _sessions: list[DonorSession] = field(default_factory=list, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self) -> ChunkScheduler:
        """Return the scheduler when it is complete, or when no donor is left.

        Raises:
            DeadlineExceeded: it took too long.
            GroupLeft: `stop` returned True.
        """
        to = self.recipient
        peers = {peer.member: peer for peer in self.answer.peers if peer.member != to.me}
        order = ask_order(list(peers.values()), me=slot_of(to.me))
        scheduler = self.scheduler = ChunkScheduler(
            order, kept=self.kept, progress=to.progress, with_inner=self.with_inner
        )
        clock, compare_at = RealClock(), 0.0
        try:
            while not scheduler.finished:
                for member in scheduler.sources_to_start():
                    session = DonorSession(
                        to.link, peers[member], job=to.job,
                        round_=self.answer.round, scheduler=scheduler,
                    )  # fmt: skip
                    self._start(member, session)
                scheduler.wait(_POLL_S)
                now = clock.monotonic()
                if scheduler.has_sources:
                    compare_at = compare_at or now + COMPARE_S
                    if now >= compare_at:
                        scheduler.stop_waiting_for_sources()
                self._drop_stalled()
                self._check(now)
        finally:
            self._stop_sessions()
        return scheduler

    def _start(self, member: str, session: DonorSession) -> None:
        self._sessions.append(session)
        thread = threading.Thread(
            target=self._ask, args=(member, session), name=f"state-of-{member}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _ask(self, member: str, session: DonorSession) -> None:
        """Run one donor's session on its thread; report once why it ended."""
        reason, kind = "", "recovery-source-lost"
        try:
            session.run()
        except SourceAdvanced as moved:
            log.info("%s is at round %d, not %d", member, moved.round, self.answer.round)
            if moved.round < self.answer.round:
                reason = f"it is at round {moved.round}"
        except AtollError as error:
            reason = error.message()
            kind = "recovery-source-refused" if isinstance(error, SourceCorrupt) else kind
            if isinstance(error, SourceDiffers):
                self.differing.add(member)
        except Exception as error:  # malformed bytes end the session with this donor only
            log.exception("a request to %s failed", member)
            reason = f"{type(error).__name__}: {error}"
        try:
            if reason and not self.scheduler.finished:
                self._report(member, reason[:500], kind=kind)
        finally:
            self.scheduler.remove_source(member)

    def refuse(self, member: str, reason: str) -> None:
        """Drop a donor whose state proved unusable."""
        self._report(member, reason, kind="recovery-source-refused")

    def _report(self, member: str, reason: str, *, kind: str) -> None:
        """Record and report why a donor was dropped, once."""
        with self._lock:
            if member in self.failed:
                return
            self.failed[member] = reason
        log.warning("%s sends no state: %s", member, reason)
        text = f"{self.recipient.me}: {member} was dropped as a source of the state: {reason}"
        self.recipient.on_event(Event(kind, text, {"source": member, "reason": reason}))

    def _drop_stalled(self) -> None:
        """Drop donors that owe chunks and send nothing."""
        late = self.scheduler.stalled()
        for session in self._sessions:
            if session.member in late:
                self._report(session.member, "it is too slow", kind="recovery-source-lost")
                self.scheduler.remove_source(session.member)
                session.close()

    def _check(self, now: float) -> None:
        if self.recipient.stop():
            raise GroupLeft("the recovery was cancelled", given=self.recipient.me)
        if now >= self.deadline and not self.scheduler.finished:
            gave = self.scheduler.donors
            raise DeadlineExceeded(
                "the state could not be fetched in time",
                given=f"{self.scheduler.nbytes} bytes came from {len(gave)} members",
                expected=f"the state of round {self.answer.round}",
            )

    def _stop_sessions(self) -> None:
        """End all sessions and join their threads."""
        self.scheduler.stop()
        for session in self._sessions:
            session.close()
        until = RealClock().monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - RealClock().monotonic()))
