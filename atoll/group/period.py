"""What a member reports when it joins a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.wire.messages import Lease, MemberStats, RoundJoin


@dataclass(frozen=True, slots=True)
class PeriodReport:
    """The period of local training that ends with a round, and the state it started from."""

    round: int
    """The round to take part in; must be the group's `committed_round`."""
    base: str
    """Digest of the committed state that this member stands on."""
    tokens: int = 0
    """Tokens trained in all, for the record."""
    steps: int = 0
    """Optimizer steps since the last round."""
    busy_s: float = 0.0
    """Seconds they took."""
    lease: Lease | None = None
    """Position in this member's data; counts if the round is committed with its contribution."""
    stats: MemberStats | None = None
    """Further statistics, for people; they decide nothing."""

    def as_join(self, *, reachable: Sequence[str] = ()) -> RoundJoin:
        """Return the message that asks for the plan of the round.

        Args:
            reachable: Members that this one can dial.
        """
        return RoundJoin(
            round=self.round, base=self.base, reachable=list(reachable), tokens=self.tokens,
            steps=self.steps, busy_s=self.busy_s, account=self.stats, lease=self.lease,
        )  # fmt: skip
