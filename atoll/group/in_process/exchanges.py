"""The exchanges of one attempt inside one process: contributions in, results out."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.codec.registry import make_codec
from atoll.errors import AtollError
from atoll.reducer.all_to_all import AllToAllMessages, Outgoing
from atoll.reducer.combine import NormHistory, combine
from atoll.reducer.mean import Mean, Share, minority
from atoll.rounds.attempt import Attempt
from atoll.wire.messages import RoundPlan, Verdict


@dataclass(slots=True)
class Exchange:
    """One reduce or one all-to-all of an attempt."""

    shares: dict[str, Share] = field(default_factory=dict)
    """Contributions to a reduce, by member."""
    parcels: dict[str, Outgoing] = field(default_factory=dict)
    """Messages of an all-to-all, by sender."""
    refused: dict[str, AtollError] = field(default_factory=dict)
    mean: Mean | None = None
    bundle: AllToAllMessages | None = None
    """All parcels, once the last one has arrived."""
    error: AtollError | None = None

    @property
    def over(self) -> bool:
        """Whether there is a result."""
        return self.mean is not None or self.bundle is not None or self.error is not None

    def compute(self, plan: RoundPlan, norms: NormHistory) -> None:
        """Combine the contributions, or hand out the parcels, that have arrived."""
        order = plan.members
        if self.parcels:
            given = [self.parcels[name] for name in order if name in self.parcels]
            self.bundle = AllToAllMessages.of(given)
            return
        shares = [self.shares[name] for name in order if name in self.shares]
        self.refused = minority(shares)
        shares = [share for share in shares if share.member not in self.refused]
        try:
            self.mean = combine(
                shares, codec=make_codec(shares[0].packet.codec), policy=shares[0].policy,
                memory=norms, round_=plan.round,
            )  # fmt: skip
            self.refused |= self.mean.refused
        except AtollError as error:
            self.error = error


@dataclass(slots=True)
class AttemptExchanges:
    """The exchanges of one attempt, and its verdict once it is decided."""

    attempt: Attempt
    """That of the round machine: its plan, and the members that have left it."""
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """Number from 0 -> exchange; all members make the same ones in the same order."""
    verdict: Verdict | None = None

    @property
    def plan(self) -> RoundPlan:
        """Who takes part."""
        return self.attempt.plan

    def compute_complete(self, norms: NormHistory) -> None:
        """Compute each exchange to which all remaining members have contributed.

        A member that has voted contributes no more, e.g. one that votes against without a result.
        """
        gone = self.attempt.left | self.attempt.votes.keys()
        for exchange in self.exchanges.values():
            here = exchange.shares.keys() | exchange.parcels.keys()
            missing = set(self.plan.members) - here - gone
            if here and not exchange.over and not missing:
                exchange.compute(self.plan, norms)
