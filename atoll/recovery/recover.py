"""Fetch the committed state from donors, and replace those that fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from atoll.checkpoint.format.memory_image import part_of
from atoll.checkpoint.format.part import Part
from atoll.clock import RealClock
from atoll.errors import CheckpointCorrupt, DeadlineExceeded, GroupLeft
from atoll.recovery.chunk_scheduler import ChunkScheduler
from atoll.recovery.fetch import Fetch, Recipient
from atoll.recovery.partial_state import PartialState
from atoll.wire.messages import Recover, Sources
from atoll.wire.recovery_messages import INNER, SHARED

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pause between attempts; doubles until an attempt has a new round."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A fetched state, not loaded into a task yet."""

    round: int
    """Committed rounds; the next one to join."""
    base: str
    """Digest of the state according to its donors; checked when it is loaded."""
    shared: Part | None
    """Equal on all members; None: no member has it, see `answer.checkpoint_round`."""
    inner: Part | None
    """Optimizer state of one member; None: no donor sent one."""
    sources: list[str]
    """Its donors in slot order."""
    seconds: float
    nbytes: int
    """Bytes of state transferred."""
    answer: Sources
    """The hub's last answer."""
    image: PartialState | None = None
    """The shared image as it came, for a fetch of a newer one; None: members have different ones.
    """

    @property
    def again_s(self) -> float:
        """Seconds that a fetch of a newer state may take: this optimizer's state is kept."""
        if self.image is None or not self.nbytes:
            return self.seconds
        return self.seconds * min(1.0, self.image.manifest.nbytes / self.nbytes)


def recover(
    recipient: Recipient,
    *,
    ask: Callable[[Recover], Sources],
    deadline: float,
    distrusted: Sequence[str] = (),
    older: Recovered | None = None,
) -> Recovered:
    """Fetch the committed state from the members that have it, several at once.

    Sources that die, are silent, lie or differ from the others are dropped with an event
    (`recovery-source-lost`, `recovery-source-refused`) and replaced; chunks of theirs that match
    the manifest are kept. While another round is committed meanwhile, the newer one is fetched.

    Args:
        recipient: The member that needs the state.
        ask: Asks the hub who has the state.
        deadline: Monotonic time at which to give up.
        distrusted: Members whose state did not fit before: asked only if no other is left.
        older: What was fetched before a newer state was committed: its optimizer state is kept, and
            of the shared image only chunks with other bytes are fetched.

    Raises:
        DeadlineExceeded: it took too long.
        GroupLeft: `recipient.stop` returned True.
        AtollError: what `ask` raised.
    """
    clock = RealClock()
    began, nbytes, pause_s = clock.monotonic(), 0, FIRST_PAUSE_S
    failed = set(distrusted)
    kept = older.image if older is not None else None
    inner = older.inner if older is not None and kept is not None else None
    round_ = -1
    while True:
        answer = ask(Recover(sorted(failed)))
        if not answer.peers:
            return Recovered(answer.round, "", None, None, [], clock.monotonic() - began, 0, answer)
        if answer.round != round_:
            round_, pause_s = answer.round, FIRST_PAUSE_S
        fetch = Fetch(recipient, answer, deadline, kept=kept, with_inner=inner is None)
        scheduler = fetch.run()
        nbytes += scheduler.nbytes
        parts = _parts(scheduler, fetch) if scheduler.complete else None
        if parts is not None and scheduler.shared is not None:
            return Recovered(
                answer.round, scheduler.shared.manifest.base, parts[0], parts[1] or inner,
                sorted(scheduler.donors), clock.monotonic() - began, nbytes, answer,
                scheduler.shared if scheduler.identical else None,
            )  # fmt: skip
        failed |= fetch.failed.keys() - fetch.differing
        kept = None if scheduler.complete else scheduler.shared or kept
        log.info("no source of round %d is left; asking the hub again", answer.round)
        _pause(pause_s, deadline=deadline, stop=recipient.stop)
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)


def _parts(scheduler: ChunkScheduler, fetch: Fetch) -> tuple[Part, Part | None] | None:
    """Return the parts in complete images; None if the agreed image is invalid."""
    if scheduler.shared is None:
        return None
    try:
        shared = part_of(scheduler.shared.buffer, SHARED)
        inner = scheduler.inner
        whole = inner is not None and inner.complete
        return shared, part_of(inner.buffer, INNER) if inner is not None and whole else None
    except CheckpointCorrupt as error:
        for member in scheduler.donors:
            fetch.refuse(member, error.message())
        return None


def _pause(seconds: float, *, deadline: float, stop: Callable[[], bool]) -> None:
    """Wait before the next attempt."""
    until = RealClock().monotonic() + seconds
    while (now := RealClock().monotonic()) < until:
        if stop():
            raise GroupLeft("the recovery was cancelled")
        if now >= deadline:
            raise DeadlineExceeded("the state could not be fetched in time")
        time.sleep(min(0.05, until - now))
