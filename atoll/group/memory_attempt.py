"""One attempt of a round in memory: what came in, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.codec.table import make_codec
from atoll.errors import AtollError
from atoll.reducer.combine import Memory, combine
from atoll.reducer.mean import Mean, Share, odd_ones
from atoll.reducer.parcels import Dealt, Gift
from atoll.wire.messages import Account, Lease, RoundPlan, Verdict


@dataclass(frozen=True, slots=True)
class Join:
    """What one member wants to take part in."""

    round: int
    base: str
    lease: Lease | None
    at: float
    """Monotonic time."""
    account: Account | None = None


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
    gifts: dict[str, Gift] = field(default_factory=dict)
    refused: dict[str, AtollError] = field(default_factory=dict)
    mean: Mean | None = None
    dealt: Dealt | None = None
    """All gifts, once the last one is in."""
    error: AtollError | None = None

    @property
    def over(self) -> bool:
        """Whether there is a result."""
        return self.mean is not None or self.dealt is not None or self.error is not None

    def compute(self, order: list[str], *, round_: int, memory: Memory) -> None:
        """Combine, or hand out, what is there.

        Args:
            order: All members, in order.
            round_: The round.
            memory: What this table remembers of earlier rounds.
        """
        if self.gifts:
            self.dealt = Dealt.of([self.gifts[name] for name in order if name in self.gifts])
            return
        shares = [self.shares[name] for name in order if name in self.shares]
        self.refused = odd_ones(shares)
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
    def accounts(self) -> dict[str, Account]:
        """What they told of their periods, for people."""
        return {m: join.account for m, join in self.joins.items() if join.account is not None}

    def compute_if_complete(self, memory: Memory) -> None:
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
