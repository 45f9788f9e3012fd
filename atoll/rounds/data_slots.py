"""Data slots: which member trains on which part of the data, and how far each part has been read.

The data has as many slots as the job can have members. A member leases one slot, and a slot has at
most one holder; free slots with the least progress are leased first. A cursor moves only with the
verdict that includes the contribution: the data of a lost or late member is trained on again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from atoll.ids import slot_of
from atoll.wire.messages import Lease

Cursor = dict[str, int]


def progress(cursor: Mapping[str, int]) -> tuple[int, int]:
    """Return the sort key of a position in a slot; greater is further."""
    return cursor.get("data_pass", 0), cursor.get("offset", 0)


def assign(
    members: Iterable[str],
    *,
    slots: int,
    cursors: Mapping[int, Cursor],
    held: Mapping[str, int],
) -> dict[str, int]:
    """Return the slot of every member (at most `slots`) for the next period.

    The slots with the least progress are assigned. A member keeps the one it holds if possible,
    else takes its own number, else the least read of the rest.
    """
    takers = sorted(members, key=slot_of)
    here, own = set(takers), {slot_of(member) for member in takers}
    holders = {slot: member for member, slot in held.items() if member in here}

    def order(slot: int) -> tuple[tuple[int, int], bool, bool, int]:
        return progress(cursors.get(slot, {})), slot not in holders, slot not in own, slot

    chosen = sorted(range(slots), key=order)[: len(takers)]
    assigned = {holders[slot]: slot for slot in chosen if slot in holders}
    free = dict.fromkeys(slot for slot in chosen if slot not in holders)
    without = [member for member in takers if member not in assigned]
    for member in [m for m in without if slot_of(m) in free]:
        assigned[member] = slot_of(member)
        del free[slot_of(member)]
    left = iter(free)
    for member in [m for m in without if m not in assigned]:
        assigned[member] = next(left)
    return assigned


@dataclass
class DataSlots:
    """The leases of one job."""

    slots: int
    cursors: dict[int, Cursor] = field(default_factory=dict)
    """Committed position of each slot."""
    _held: dict[str, int] = field(default_factory=dict)
    _holders: dict[int, str] = field(default_factory=dict)
    """The same by slot, because every join looks up the holder of one."""

    @property
    def held(self) -> Mapping[str, int]:
        """The slot of each member that holds one."""
        return self._held

    def hold(self, member: str, slot: int) -> None:
        """Record that a member holds a slot, and no other one."""
        before = self._held.get(member)
        if before is not None and self._holders.get(before) == member:
            del self._holders[before]
        self._held[member] = slot
        self._holders.setdefault(slot, member)

    def hold_only(self, held: Mapping[str, int]) -> None:
        """Record who holds which slot; no other member holds any."""
        self._held, self._holders = {}, {}
        for member, slot in held.items():
            self.hold(member, slot)

    def lease(self, member: str) -> Lease:
        """Return a member's lease; assigns a free slot if it has none."""
        if member not in self._held:
            free = [slot for slot in range(self.slots) if slot not in self._holders]
            own = slot_of(member)
            self.hold(
                member, min(free, key=lambda s: (progress(self.cursors.get(s, {})), s != own, s))
            )
        slot = self._held[member]
        return Lease(slot, dict(self.cursors.get(slot, {})))

    def wrong(self, member: str, lease: Lease) -> str:
        """Return why a lease cannot be this member's, or an empty text."""
        holder = self._holders.get(lease.slot, member)
        if not 0 <= lease.slot < self.slots:
            return f"slot {lease.slot} does not exist, there are {self.slots}"
        if self._held.get(member, lease.slot) != lease.slot or holder != member:
            return f"slot {lease.slot} is not its own"
        if progress(lease.cursor) < progress(self.cursors.get(lease.slot, {})):
            return f"the cursor of slot {lease.slot} moves back"
        return ""

    def take_over(self, member: str, lease: Lease) -> None:
        """Record a contributor's position, already checked with `wrong`."""
        self.hold(member, lease.slot)
        self.cursors[lease.slot] = dict(lease.cursor)

    def renew(self, members: Iterable[str]) -> dict[str, Lease]:
        """Assign the slots for the next period; members not named lose theirs."""
        self.hold_only(assign(members, slots=self.slots, cursors=self.cursors, held=self._held))
        return {member: self.lease(member) for member in self._held}

    def set_back(self, cursors: Mapping[int, Cursor]) -> None:
        """Return to earlier cursors; no slot is held."""
        self.cursors = {slot: dict(cursor) for slot, cursor in cursors.items()}
        self.hold_only({})
