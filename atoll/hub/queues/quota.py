"""Quotas of queues: bytes in one, and bytes in all of one job.

Counted from the states of the queues, which follow what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atoll.config.sizes import size_text
from atoll.errors import QueueFull
from atoll.hub.queues.backend import INTERNAL
from atoll.hub.queues.state import QueueState
from atoll.hub.quotas.ledger import Holder, Ledger
from atoll.hub.quotas.limits import Kind

REMEDY = (
    "acknowledge items, discard dead letters (`atoll queue dead`), or delete jobs; or let the "
    "hub's owner raise the limit"
)


@dataclass(slots=True)
class _Family:
    """The queues of one job."""

    name: str
    states: set[QueueState] = field(default_factory=set)
    nbytes: int = 0


class QueueRoom:
    """The byte quotas of all queues except the hub's own.

    The first part of a queue's name is its job, or the name that several jobs share.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._families: dict[str, _Family] = {}
        self.waiting = 0
        """Producers that wait at any queue."""
        self.is_job: Callable[[str], bool] = lambda name: True
        ledger.sources.append(self._uses)

    def add(self, state: QueueState) -> None:
        """Count a new queue with those of its job."""
        if not state.queue.startswith(INTERNAL):
            state.room = self
            name = _family_name(state)
            self._families.setdefault(name, _Family(name)).states.add(state)

    def remove(self, state: QueueState) -> None:
        """Forget a queue."""
        family = self._families.get(_family_name(state))
        if family is None or state not in family.states:
            return
        family.states.discard(state)
        family.nbytes -= state.held_bytes
        state.room = None
        if not family.states:
            del self._families[family.name]
        self.freed(state)

    def changed(self, state: QueueState, more: int) -> None:
        """Record that a queue holds `more` bytes more than before."""
        self._families[_family_name(state)].nbytes += more

    def freed(self, state: QueueState) -> None:
        """Admit producers of the other queues of its job, if there is room now."""
        family = self._families.get(_family_name(state)) if self.waiting else None
        for other in family.states if family is not None else ():
            if other is not state and other.waiting:
                other.admit()

    def left(self, state: QueueState, more: int) -> int:
        """Return the bytes that are left after `more` come to a queue; negative: too few."""
        return min(
            (limit - used - more for _, _, used, limit in self._limits(state)), default=2**62
        )

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

    def _limits(self, state: QueueState) -> Iterable[tuple[Kind, Holder, int, int]]:
        if limit := self._ledger.quotas.queue:
            yield Kind.QUEUE, Holder("queue", state.queue), state.held_bytes, limit
        family = self._families[_family_name(state)]
        holder = self._holder(family.name)
        if limit := self._ledger.limit(Kind.JOB_QUEUES, holder):
            yield Kind.JOB_QUEUES, holder, family.nbytes, limit

    def _holder(self, name: str) -> Holder:
        return Holder("job" if self.is_job(name) else "queues", name)

    async def _uses(self) -> list[tuple[Kind, Holder, int]]:
        found = []
        for family in self._families.values():
            if family.nbytes:
                found.append((Kind.JOB_QUEUES, self._holder(family.name), family.nbytes))
            found += [
                (Kind.QUEUE, Holder("queue", state.queue), state.held_bytes)
                for state in family.states
                if state.held_bytes
            ]
        return found


def _family_name(state: QueueState) -> str:
    return state.queue.partition("/")[0]
