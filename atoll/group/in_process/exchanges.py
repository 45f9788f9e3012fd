"""The exchanges of one attempt in one process."""

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
    messages: dict[str, Outgoing] = field(default_factory=dict)
    refused: dict[str, AtollError] = field(default_factory=dict)
    mean: Mean | None = None
    bundle: AllToAllMessages | None = None
    """All packets, once the last member has sent its own."""
    error: AtollError | None = None

    @property
    def over(self) -> bool:
        """Whether it has a result or an error."""
        return self.mean is not None or self.bundle is not None or self.error is not None

    def compute(self, plan: RoundPlan, norms: NormHistory) -> None:
        """Combine the contributions, or collect the packets, that have arrived."""
        order = plan.members
        if self.messages:
            given = [self.messages[name] for name in order if name in self.messages]
            self.bundle = AllToAllMessages.of(given)
            return
        shares = [self.shares[name] for name in order if name in self.shares]
        self.refused = minority(shares)
        shares = [share for share in shares if share.member not in self.refused]
        try:
            self.mean = combine(
                shares, codec=make_codec(shares[0].packet.codec), aggregation=shares[0].aggregation,
                memory=norms, round_=plan.round,
            )  # fmt: skip
            self.refused |= self.mean.refused
        except AtollError as error:
            self.error = error


@dataclass(slots=True)
class AttemptExchanges:
    """The exchanges of one attempt, and its verdict."""

    attempt: Attempt
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    """By number from 0, equal on all members."""
    verdict: Verdict | None = None

    @property
    def plan(self) -> RoundPlan:
        """The plan of the attempt."""
        return self.attempt.plan

    def compute_complete(self, norms: NormHistory) -> None:
        """Compute each exchange to which all remaining members have contributed.

        A member that has voted contributes no more, e.g. one that votes against without a result.
        """
        gone = self.attempt.left | self.attempt.votes.keys()
        for exchange in self.exchanges.values():
            here = exchange.shares.keys() | exchange.messages.keys()
            missing = set(self.plan.members) - here - gone
            if here and not exchange.over and not missing:
                exchange.compute(self.plan, norms)
