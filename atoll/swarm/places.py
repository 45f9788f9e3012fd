"""A job's settings of its SWARM, and its members as the ledger knows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from atoll.swarm.rebalance import Move, Server, Stages, fill_empty, plan_moves
from atoll.wire.swarm import Holder, SwarmAnnounce, SwarmPeer

LEAST_ROW_S, MOST_ROW_S = 1e-9, 1e6
"""Limits of a plausible speed."""


def plausible(row_s: float) -> float:
    """Return reported seconds per row; 0, which means unknown, if no machine can be like that."""
    return row_s if LEAST_ROW_S <= row_s <= MOST_ROW_S else 0.0


@dataclass(frozen=True)
class SwarmSettings:
    """The job's part of a ledger."""

    stages: int
    microbatches: int
    """Per step."""
    early: int = 0
    """The first so many microbatches of a step are computed on the weights of the step before."""
    agrees: bool = True
    """The members of a stage meet in a round in every step. Otherwise each applies its own sum."""
    rebalance_s: float = 300.0
    """Seconds between two changes of places; 0: never."""
    costs: Sequence[float] = ()
    """Relative cost of a row, by stage."""
    needs_bytes: Sequence[int] = ()
    """Memory of a member, by stage."""
    steps: int = 0
    """Steps of the job; 0: unknown, its members end by themselves."""
    neighbours: bool = False
    """A stage whose state no member has becomes the mean of its neighbours, where these fit."""
    save_every: int = 0
    """Steps between two checkpoints; 0: only the last step is saved."""


@dataclass
class Member:
    """A member as the ledger knows it."""

    holder: Holder
    stage: int
    ready: bool = False
    applies: bool = False
    """It announced that it can apply the present step."""
    holds: int = 0
    """How often it came too late with its state."""
    late_step: int = -1
    """Of that state."""
    hold_until: float = 0.0
    """While it recovers: its stage stays open until then."""
    dial: list[str] = field(default_factory=list)
    row_s: float = 0.0
    queue: float = 0.0
    free_bytes: int = 0

    def measured(self, row_s: float) -> None:
        """Keep reported seconds per row, unless they are unknown or absurd."""
        self.row_s = plausible(row_s) or self.row_s

    def peer(self) -> SwarmPeer:
        """Return it as the table of members names it."""
        holder = self.holder
        return SwarmPeer(holder.member, holder.epoch, self.stage, self.dial, self.row_s)

    def came_late(self, body: SwarmAnnounce, step: int) -> bool:
        """Return whether it has fetched its stage's state of a step that is over, for each once."""
        late = body.stage == self.stage and self.late_step < body.step < step
        if late:
            self.late_step, self.holds = body.step, self.holds + 1
        return late

    def server(self) -> Server:
        """Return it as rebalancing sees it."""
        return Server(self.holder.member, self.row_s, self.queue, self.free_bytes)


@dataclass
class Balance:
    """Plans moves to the slowest stage, once in every period."""

    _at: float | None = None
    """When it last did, or when the first step was complete."""

    def moves(self, settings: SwarmSettings, members: Collection[Member], now: float) -> list[Move]:
        """Return the moves that are due now, between two steps."""
        if self._at is None:
            self._at = now
        due = settings.rebalance_s and now >= self._at + settings.rebalance_s
        if not due or not all(member.ready for member in members):
            return []
        self._at = now
        return plan_moves(stages_of(settings, members))


def stages_of(settings: SwarmSettings, members: Iterable[Member]) -> Stages:
    """Return who serves what, as rebalancing sees it."""
    members = list(members)
    servers = [
        [m.server() for m in members if m.stage == stage] for stage in range(settings.stages)
    ]
    return Stages(servers, settings.costs, settings.needs_bytes)


def why_paused(empty: Sequence[int], needs_bytes: Sequence[int]) -> str:
    """Return why nothing is leased while these stages have no member; empty if there are none."""
    if not empty:
        return ""
    several = len(empty) > 1
    text = f"no member serves stage{'s' if several else ''} {', '.join(map(str, empty))}"
    needs = [needs_bytes[stage] for stage in empty if needs_bytes]
    most = "needs up to" if several else "needs"
    return text + (f": {most} {max(needs) / 1e9:.1f} GB of memory" if needs else "")


def moves_to_empty(settings: SwarmSettings, members: Iterable[Member]) -> list[Move]:
    """Return moves that give every stage without members one that another stage can spare."""
    members = list(members)
    there = {member.stage for member in members}
    empty = [stage for stage in range(settings.stages) if stage not in there]
    if not empty:
        return []
    ready = [member for member in members if member.ready]
    stages, served = stages_of(settings, ready), {member.stage for member in ready}
    # A member that only recovers its state costs nothing to move.
    coming = [member for member in members if not member.ready and member.stage in served]
    moves = []
    for member, stage in zip(coming, list(empty), strict=False):
        if stages.fits(member.server(), stage):
            reason = f"stage {stage} had no member, and it had no state yet"
            moves.append(Move(member.holder.member, member.stage, stage, reason))
            empty.remove(stage)
    return moves + fill_empty(stages, empty)
