"""The report with which a member joins a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from atoll.wire.messages import Commitment, Lease, MemberStats, RoundJoin

NO_LINES: Mapping[str, tuple[float, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class PeriodReport:
    """The period of local training that ends with a round, and the state it started from."""

    round: int
    """The round to join; must equal the group's `committed_round`."""
    base: str
    """Digest of the committed state that this member holds."""
    tokens: int = 0
    """Tokens trained in total, for the record."""
    steps: int = 0
    busy_s: float = 0.0
    """Compute seconds of those steps."""
    lease: Lease | None = None
    """Position in this member's data; recorded if the round commits with its contribution."""
    stats: MemberStats | None = None
    """Statistics for people, without influence on the round."""
    group: int = -1
    """Stage of a SWARM whose members meet; -1: the one that this member serves, or the only one."""
    closing: int = 0
    """In a SWARM, what the members of the stage meet for; see `SwarmNews.closing`."""
    commitment: Commitment | None = None
    """What this member computed, where others may compute it again."""

    def as_join(
        self, *, reachable: Sequence[str] = (), lines: Mapping[str, tuple[float, float]] = NO_LINES
    ) -> RoundJoin:
        """Return the message that asks for a plan.

        `reachable`: members that accept connections; `lines`: as in `RoundJoin`.
        """
        return RoundJoin(
            round=self.round, base=self.base, reachable=list(reachable), lines=dict(lines),
            tokens=self.tokens, steps=self.steps, busy_s=self.busy_s, stats=self.stats,
            lease=self.lease, group=self.group, closing=self.closing, commitment=self.commitment,
        )  # fmt: skip
