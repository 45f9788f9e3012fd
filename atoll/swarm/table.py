"""The table of a SWARM's members: who serves which stage."""

from __future__ import annotations

from atoll.swarm.places import Member, SwarmSettings, stages_of, why_paused
from atoll.swarm.rebalance import Stages
from atoll.wire.swarm import SwarmPeer


class MemberTable:
    """The members that have announced themselves, by name."""

    def __init__(self, settings: SwarmSettings) -> None:
        """Begin without members."""
        self.settings = settings
        self.members: dict[str, Member] = {}
        self.table = 1
        """Version of what :meth:`peers` returns."""

    def stage_of(self, member: str) -> int:
        """Return the stage that a member serves; -1: none at present."""
        known = self.members.get(member)
        return known.stage if known is not None and known.ready else -1

    def serving(self, stage: int) -> list[Member]:
        """Return the ready members of a stage."""
        return [m for m in self.members.values() if m.ready and m.stage == stage]

    def paused(self) -> str:
        """Return why nothing is leased, or an empty text."""
        return why_paused(self.empty(), self.settings.needs_bytes)

    def empty(self) -> list[int]:
        """Return the stages that no member serves."""
        return [s for s in range(self.settings.stages) if not self.serving(s)]

    def peers(self) -> list[SwarmPeer]:
        """Return the table of all ready members."""
        return [member.peer() for member in self.members.values() if member.ready]

    def stages(self, *, ready: bool = True) -> Stages:
        """Return the members by stage, as rebalancing sees them; `ready`: only those that serve."""
        there = [m for m in self.members.values() if m.ready or not ready]
        return stages_of(self.settings, there)
