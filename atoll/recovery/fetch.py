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
from atoll.recovery.donor_session import DonorSession, in_turn
from atoll.recovery.partial_state import PartialState
from atoll.recovery.source import SourceAdvanced, SourceCorrupt, SourceDiffers
from atoll.wire.messages import Event, Sources

log = logging.getLogger(__name__)

GATHER_S = 0.5
"""So long after the first source has spoken the others may take to say that they differ."""

_POLL_S = 0.1
_END_S = 2.0


@dataclass(slots=True)
class Fetch:
    """See the module's docstring; used once, from one thread."""

    link: SyncLink
    answer: Sources
    job: str
    me: str
    on_event: Callable[[Event], None]
    deadline: float
    """Monotonic time at which to give up."""
    stop: Callable[[], bool] = lambda: False
    progress: Progress | None = None
    kept: PartialState | None = None
    """A shared image that an earlier attempt began."""
    failed: dict[str, str] = field(default_factory=dict, init=False)
    """Sources that gave nothing usable, and why."""
    differing: set[str] = field(default_factory=set, init=False)
    """Of them, those that merely differ from the others; they may be the ones that are right."""
    board: ChunkScheduler = field(init=False)
    _askings: list[DonorSession] = field(default_factory=list, init=False)
    _threads: list[threading.Thread] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self) -> ChunkScheduler:
        """Return the board when it is complete, or when no source is left.

        Raises:
            DeadlineExceeded: it took too long.
            GroupLeft: `stop` said so.
        """
        peers = {peer.member: peer for peer in self.answer.peers if peer.member != self.me}
        order = in_turn(list(peers.values()), me=slot_of(self.me))
        board = self.board = ChunkScheduler(order, kept=self.kept, progress=self.progress)
        clock, gather = RealClock(), 0.0
        try:
            while not board.over:
                for member in board.due():
                    asking = DonorSession(
                        self.link, peers[member], job=self.job,
                        round_=self.answer.round, board=board,
                    )  # fmt: skip
                    self._start(member, asking)
                board.wait(_POLL_S)
                now = clock.monotonic()
                if board.heard:
                    gather = gather or now + GATHER_S
                    if now >= gather:
                        board.settle()
                self._drop_late()
                self._check(now)
        finally:
            self._end()
        return board

    def _start(self, member: str, asking: DonorSession) -> None:
        self._askings.append(asking)
        thread = threading.Thread(
            target=self._ask, args=(member, asking), name=f"state-of-{member}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _ask(self, member: str, asking: DonorSession) -> None:
        """Run on the thread of one source: whatever ends it is told, once."""
        reason, kind = "", "recovery-source-lost"
        try:
            asking.run()
        except SourceAdvanced as moved:
            log.info("%s stands on round %d, not %d", member, moved.stands, self.answer.round)
            if moved.stands < self.answer.round:
                reason = f"it stands on round {moved.stands}"
        except AtollError as error:
            reason = error.message()
            kind = "recovery-source-refused" if isinstance(error, SourceCorrupt) else kind
            if isinstance(error, SourceDiffers):
                self.differing.add(member)
        except Exception as error:  # bytes of a stranger: whatever they did, it ends this one only
            log.exception("asking %s failed", member)
            reason = f"{type(error).__name__}: {error}"
        try:
            if reason and not self.board.over:
                self._blame(member, reason[:500], kind=kind)
        finally:
            self.board.left(member)

    def refuse(self, member: str, reason: str) -> None:
        """Drop a source whose state turned out to be unusable."""
        self._blame(member, reason, kind="recovery-source-refused")

    def _blame(self, member: str, reason: str, *, kind: str) -> None:
        """Note and report why a source was dropped, once."""
        with self._lock:
            if member in self.failed:
                return
            self.failed[member] = reason
        log.warning("%s gives no state: %s", member, reason)
        text = f"{self.me}: {member} was dropped as a source of the state: {reason}"
        self.on_event(Event(kind, text, {"source": member, "reason": reason}))

    def _drop_late(self) -> None:
        """Give sources up that hold chunks and send nothing."""
        late = self.board.late()
        for asking in self._askings:
            if asking.member in late:
                self._blame(asking.member, "it is too slow", kind="recovery-source-lost")
                self.board.left(asking.member)
                asking.close()

    def _check(self, now: float) -> None:
        if self.stop():
            raise GroupLeft("the recovery was given up", given=self.me)
        if now >= self.deadline and not self.board.over:
            raise DeadlineExceeded(
                "the state could not be fetched in time",
                given=f"{self.board.nbytes} bytes came from {len(self.board.gave)} members",
                expected=f"the state of round {self.answer.round}",
            )

    def _end(self) -> None:
        """End all threads; each wakes from whatever it waits for."""
        self.board.stop()
        for asking in self._askings:
            asking.close()
        until = RealClock().monotonic() + _END_S
        for thread in self._threads:
            thread.join(max(0.0, until - RealClock().monotonic()))
