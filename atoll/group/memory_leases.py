"""Which member trains on which stretch of the data until the next verdict; pure.

Slots are as many as the group can have members. Who has one keeps its own number as long as all
slots are taken; with fewer members the slots that lag behind go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.wire.messages import Lease


class Leases:
    """The slots of one group and where each stands."""

    def __init__(self, num_slots: int) -> None:
        """Start every slot at its beginning; members are numbered by their order."""
        self.num_slots = num_slots
        self._cursors: dict[int, dict[str, int]] = {}
        self._held: dict[str, int] = {}
        self._used = False

    def commit(self, moved: Mapping[str, Lease], members: Sequence[str]) -> dict[str, Lease]:
        """Take over how far contributors came, and deal the slots anew.

        Args:
            moved: Where the contributors' data stands; nobody's: no leases are wanted.
            members: Who gets a slot, in the order of the group.

        Returns:
            Member -> lease, no slot twice.
        """
        self._used = self._used or bool(moved)
        if not self._used:
            return {}
        for lease in moved.values():
            self._cursors[lease.slot] = dict(lease.cursor)
        self._held = self._deal(members)
        return {m: Lease(slot, self._cursors.get(slot, {})) for m, slot in self._held.items()}

    def for_newcomer(self, member: str, members: Sequence[str]) -> Lease | None:
        """Return a lease that no other of the `members` has; None if leases are not used."""
        if not self._used:
            return None
        taken = {slot for m, slot in self._held.items() if m != member and m in members}
        free = [slot for slot in range(self.num_slots) if slot not in taken]
        if not free:
            return None
        slot = min(free, key=self._progress)
        self._held[member] = slot
        return Lease(slot, self._cursors.get(slot, {}))

    def _deal(self, members: Sequence[str]) -> dict[str, int]:
        wishes = [self._wishes(number, member) for number, member in enumerate(members)]
        wanted = {slot for wish in wishes for slot in wish}
        order = sorted(
            range(self.num_slots), key=lambda slot: (self._progress(slot), slot not in wanted)
        )
        chosen = set(order[: len(members)])
        dealt: dict[str, int] = {}
        for choice in (0, 1):
            for member, wish in zip(members, wishes, strict=True):
                if member not in dealt and wish[choice] in chosen:
                    dealt[member] = wish[choice]
                    chosen.discard(wish[choice])
        for member in members:
            if member not in dealt and chosen:
                dealt[member] = min(chosen)
                chosen.discard(dealt[member])
        return dealt

    def _wishes(self, number: int, member: str) -> tuple[int, int]:
        """Return the slot that a member holds, and its own number."""
        own = int(member[1:]) if member[1:].isdigit() else number
        return self._held.get(member, own), own

    def _progress(self, slot: int) -> tuple[int, int]:
        cursor = self._cursors.get(slot, {})
        return cursor.get("data_pass", 0), cursor.get("offset", 0)
