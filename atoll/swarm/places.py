"""A job's settings of its SWARM, and its members as the ledger knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.swarm.rebalance import Server
from atoll.wire.swarm import Holder


@dataclass(frozen=True)
class SwarmSettings:
    """The job's part of a ledger."""

    stages: int
    microbatches: int
    """Per step."""
    agrees: bool = True
    """The members of a stage meet in a round in every step. Otherwise each applies its own sum."""
    rebalance_s: float = 300.0
    """Seconds between two changes of places; 0: never."""
    costs: Sequence[float] = ()
    """Relative cost of a row, by stage."""
    needs_bytes: Sequence[int] = ()
    """Memory of a member, by stage."""


@dataclass
class Member:
    """A member as the ledger knows it."""

    holder: Holder
    stage: int
    ready: bool = False
    applies: bool = False
    """It announced that it can apply the present step."""
    hold_until: float = 0.0
    """While it recovers: its stage stays open until then."""
    dial: list[str] = field(default_factory=list)
    row_s: float = 0.0
    queue: float = 0.0
    free_bytes: int = 0

    def server(self) -> Server:
        """Return it as rebalancing sees it."""
        return Server(self.holder.member, self.row_s, self.queue, self.free_bytes)
