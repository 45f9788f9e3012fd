"""Quotas of queues: bytes in one, and bytes in all of one job.

Counted from the states of the queues, which follow what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from atoll.config.sizes import size_text
from atoll.errors import QueueFull
from atoll.hub.queues.backend import INTERNAL
from atoll.hub.queues.state import QueueState
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import Kind

NO_LIMIT = 2**62

REMEDY = (
    "acknowledge items, discard dead letters (`atoll queue dead`), or delete jobs; or let the "
    "hub's owner raise the limit"
)


class JobRoom:
    """The byte quotas of the queues of one job, or of those that share the first part of a name."""

    def __init__(self, name: str, ledger: Ledger, is_job: Callable[[str], bool]) -> None:
        self.name = name
        self.states: set[QueueState] = set()
        self.nbytes = 0
        """Of all its queues, as they reported."""
        self.waiting = 0
        """Producers that wait at any of its queues."""
        self._ledger, self._is_job = ledger, is_job
        self._as_job, self._as_queues = Holder("job", name), Holder("queues", name)

    @property
    def holder(self) -> Holder:
        """Whose the limit is; the name may become that of a job."""
        return self._as_job if self._is_job(self.name) else self._as_queues

    def left(self, state: QueueState, more: int) -> int:
        """Return the bytes that are left after `more` come to a queue; negative: too few."""
        left = NO_LIMIT
        if limit := self._ledger.quotas.queue:
            left = limit - state.held_bytes - more
        if limit := self._ledger.limit(Kind.JOB_QUEUES, self.holder):
            left = min(left, limit - self.nbytes - more)
        return left

    def could_hold(self, state: QueueState, more: int) -> bool:
        """Return whether so many bytes would fit if all else were gone."""
        return all(more <= limit for _, _, _, limit in self._limits(state))

    def refusal(self, state: QueueState, more: int) -> QueueFull | None:
        """Return the error if so many bytes do not fit; None: they do."""
        for kind, holder, used, limit in self._limits(state):
            if used + more > limit:
                self._ledger.note(kind, holder, used=used)
                return QueueFull(
                    f"{holder.text} has reached a limit of this hub: {kind.text}",
                    given=f"{size_text(used)} in use, {size_text(more)} more for {state.queue!r}",
                    expected=f"at most {size_text(limit)} ({kind.value} in "
                    f"{self._ledger.place(kind, holder)})",
                    remedy=REMEDY,
                )
        return None

    def freed(self, state: QueueState) -> None:
        """Admit producers of its other queues, if there is room now."""
        for other in self.states if self.waiting else ():
            if other is not state and other.waiting:
                other.admit()

    def _limits(self, state: QueueState) -> Iterable[tuple[Kind, Holder, int, int]]:
        if limit := self._ledger.quotas.queue:
            yield Kind.QUEUE, Holder("queue", state.queue), state.held_bytes, limit
        holder = self.holder
        if limit := self._ledger.limit(Kind.JOB_QUEUES, holder):
            yield Kind.JOB_QUEUES, holder, self.nbytes, limit


class QueueRoom:
    """The byte quotas of all queues except the hub's own.

    The first part of a queue's name is its job, or the name that several jobs share.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._jobs: dict[str, JobRoom] = {}
        self.is_job: Callable[[str], bool] = lambda name: True
        ledger.sources.append(self._uses)

    def add(self, state: QueueState) -> None:
        """Count a new queue with those of its job."""
        if state.queue.startswith(INTERNAL):
            return
        name = state.queue.partition("/")[0]
        room = self._jobs.get(name)
        if room is None:
            room = self._jobs[name] = JobRoom(name, self._ledger, lambda name: self.is_job(name))
        room.states.add(state)
        state.room = room

    def remove(self, state: QueueState) -> None:
        """Forget a queue."""
        room = self._jobs.get(state.queue.partition("/")[0])
        if room is None or state not in room.states:
            return
        room.states.discard(state)
        room.nbytes -= state.held_bytes
        state.room = None
        if not room.states:
            del self._jobs[room.name]
        room.freed(state)

    async def _uses(self) -> list[tuple[Kind, Holder, int]]:
        found = []
        for room in self._jobs.values():
            if room.nbytes:
                found.append((Kind.JOB_QUEUES, room.holder, room.nbytes))
            found += [
                (Kind.QUEUE, Holder("queue", state.queue), state.held_bytes)
                for state in room.states
                if state.held_bytes
            ]
        return found
