"""One attempt of a round in memory: what came in, and what follows from it.

Which member trains on which stretch of the data until the next verdict; pure.

Slots are as many as the group can have members. Who has one keeps its own number as long as all
slots are taken; with fewer members the slots that lag behind go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.codec.registry import make_codec
from atoll.errors import AtollError
from atoll.reducer.all_to_all import AllToAllMessages, Outgoing
from atoll.reducer.combine import NormHistory, combine
from atoll.reducer.mean import Mean, Share, minority
from atoll.wire.messages import Lease, MemberStats, RoundPlan, Verdict


@dataclass(frozen=True, slots=True)
class Join:
    """What one member wants to take part in."""

    round: int
    base: str
    lease: Lease | None
    at: float
    """Monotonic time."""
    account: MemberStats | None = None


@dataclass(frozen=True, slots=True)
class Vote:
    """What one member says of an attempt."""

    ok: bool
    digest: str
    reason: str
    contributors: tuple[str, ...] = ()


@dataclass(slots=True)
class Exchange:
    """One reduce or one swap of an attempt: what came in, and what came of it."""

    shares: dict[str, Share] = field(default_factory=dict)
    gifts: dict[str, Outgoing] = field(default_factory=dict)
    refused: dict[str, AtollError] = field(default_factory=dict)
    mean: Mean | None = None
    dealt: AllToAllMessages | None = None
    """All gifts, once the last one is in."""
    error: AtollError | None = None

    @property
    def over(self) -> bool:
        """Whether there is a result."""
        return self.mean is not None or self.dealt is not None or self.error is not None

    def compute(self, order: list[str], *, round_: int, memory: NormHistory) -> None:
        """Combine, or hand out, what is there.

        Args:
            order: All members, in order.
            round_: The round.
            memory: What this table remembers of earlier rounds.
        """
        if self.gifts:
            self.dealt = AllToAllMessages.of(
                [self.gifts[name] for name in order if name in self.gifts]
            )
            return
        shares = [self.shares[name] for name in order if name in self.shares]
        self.refused = minority(shares)
        shares = [share for share in shares if share.member not in self.refused]
        try:
            self.mean = combine(
                shares, codec=make_codec(shares[0].packet.codec), policy=shares[0].policy,
                memory=memory, round_=round_,
            )  # fmt: skip
            self.refused |= self.mean.refused
        except AtollError as error:
            self.error = error


@dataclass(slots=True)
class Attempt:
    """One epoch: its plan and what came in."""

    plan: RoundPlan
    joins: dict[str, Join] = field(default_factory=dict)
    """What its members told when they joined."""
    left: set[str] = field(default_factory=set)
    """Members of the plan that are not waited for any more."""
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """Number from 0 -> a reduce or a swap; members do the same ones in the same order."""
    votes: dict[str, Vote] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def leases(self) -> dict[str, Lease]:
        """Where the members' data stood when they joined."""
        return {m: join.lease for m, join in self.joins.items() if join.lease is not None}

    @property
    def accounts(self) -> dict[str, MemberStats]:
        """What they told of their periods, for people."""
        return {m: join.account for m, join in self.joins.items() if join.account is not None}

    def compute_if_complete(self, memory: NormHistory) -> None:
        """End every exchange for which no member is missing of those that are waited for."""
        members = self.plan.members
        for exchange in self.exchanges.values():
            here = exchange.shares.keys() | exchange.gifts.keys()
            if here and not exchange.over and not set(members) - here - self.left:
                exchange.compute(members, round_=self.plan.round, memory=memory)


def why_aborted(votes: Mapping[str, Vote]) -> str:
    """Return why an attempt with these votes cannot be committed; empty if it can."""
    if not votes:
        return "every member was lost before it voted"
    against = [f"{name}: {vote.reason}" for name, vote in votes.items() if not vote.ok]
    if not against and len({vote.digest for vote in votes.values()}) > 1:
        return "members hold different results"
    return "; ".join(against)


class MemoryLeases:
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
