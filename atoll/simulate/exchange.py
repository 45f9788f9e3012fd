"""The exchange of one attempt: who has contributed, when the result arrives, and what fails it.

Only sizes move. On the relay every member sends through the hub to the reducer beside it. Members
of a site reduce inside it first and their delegate relays one contribution (`hierarchical`); if all
reach each other that is all (`direct`). A reduce between members ends with the loss of one of them,
as `torch.distributed` does; the reducer leaves a lost member out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RoundPlan

if TYPE_CHECKING:
    from atoll.simulate.hub import SimulatedHub
    from atoll.simulate.member import SimulatedMember


@dataclass(eq=False)
class Team:
    """Members that deliver one contribution together; on the relay each is a team of its own."""

    members: list[str]
    missing: set[str]
    """Members that have not begun."""
    arrived: bool = False


@dataclass(eq=False)
class Exchange:
    """See the module's docstring."""

    hub: SimulatedHub
    plan: RoundPlan
    teams: dict[str, Team] = field(default_factory=dict)
    """By member."""
    waiting: set[int] = field(default_factory=set)
    """Ids of the teams that have not delivered."""
    members: dict[str, SimulatedMember] = field(default_factory=dict)
    """The processes that the plan is for: a member may be placed again meanwhile."""
    contributors: list[str] = field(default_factory=list)
    first_at: float = 0.0
    """When the first piece of the last team to begin is at the reducer."""
    closed: bool = False
    complete: bool = False

    def __post_init__(self) -> None:
        plan = self.plan
        self.members = {name: self.hub.members[name] for name in plan.members}
        self.moved = self.hub.setting.moved(plan.round, len(plan.members))
        groups: list[list[str]] = [[member] for member in plan.members]
        if plan.route == "hierarchical":
            groups = [list(site) for site in plan.sites]
        elif plan.route == "direct":
            groups = [list(plan.members)]
        for names in groups:
            team = Team(names, set(names))
            self.waiting.add(id(team))
            self.teams |= dict.fromkeys(names, team)

    @property
    def relays(self) -> bool:
        """Whether contributions go through the hub."""
        return self.plan.route in ("relay", "hierarchical")

    def begin(self, member: SimulatedMember) -> None:
        """A member has the plan, and begins to send."""
        team = self.teams[member.name]
        team.missing.discard(member.name)
        if self.closed or team.missing or team.arrived:
            return
        hub, scheduler = self.hub, self.hub.scheduler
        now = scheduler.now + self._inside_s(team, member)
        if self.relays:
            delegate = self.members[team.members[0]].machine
            piece = min(CHUNK_BYTES, self.moved.relay_sent)
            first_s = 8 * piece / delegate.profile.up_bps + delegate.profile.one_way_s
            self.first_at = max(self.first_at, now + first_s)
            now = hub.network.relayed_in(delegate, now, self.moved.relay_sent)
        scheduler.at(now, lambda: self._arrive(team))

    def _inside_s(self, team: Team, member: SimulatedMember) -> float:
        """Return the seconds of the reduce inside a team."""
        count, hub = len(team.members), self.hub
        if count == 1:
            return 0.0
        moved = self.moved
        if count < len(self.plan.members):
            moved = hub.setting.moved(self.plan.round, count)
        first = self.members[team.members[0]].machine
        rates = [self.members[m].machine.inside_bps(first) for m in team.members]
        hub.record.events["bytes inside sites"] += round(moved.direct_sent * count)
        nbytes = max(moved.direct_sent, moved.direct_received)
        return 8 * nbytes / min(rates) + 2 * member.profile.one_way_s

    def _arrive(self, team: Team) -> None:
        if self.closed or team.arrived or id(team) not in self.waiting:
            return
        team.arrived = True
        self.contributors += team.members
        self.waiting.discard(id(team))
        self._check()

    def _check(self) -> None:
        if self.waiting or self.complete or self.closed:
            return
        self.complete = True
        hub, scheduler = self.hub, self.hub.scheduler
        size = self.moved.relay_received
        order = {member: place for place, member in enumerate(self.plan.members)}
        self.contributors.sort(key=order.__getitem__)
        last = size
        if len(self.contributors) == len(self.plan.members):
            self.contributors = self.plan.members
            last = min(size, self.moved.relay_last)
        done: set[int] = set()
        for name in self.plan.members:
            team = self.teams[name]
            if id(team) in done or not team.arrived:
                continue
            done.add(id(team))
            now = scheduler.now
            delegate = self.members[team.members[0]]
            if self.relays:
                if last < size:
                    early = min(now, self.first_at)
                    early = hub.network.relayed_out(delegate.machine, early, size - last)
                    now = max(early, hub.network.relayed_out(delegate.machine, now, last))
                else:
                    now = hub.network.relayed_out(delegate.machine, now, size)
            for other in team.members:
                member, extra_s = self.members[other], 0.0
                if len(team.members) > 1 and self.relays and member is not delegate:
                    extra_s = 8 * size / member.machine.inside_bps(delegate.machine)
                scheduler.at(now + extra_s, partial(member.resulted, self), member.process)

    def drop(self, name: str) -> None:
        """The hub waits for a member no longer: the reducer leaves it out, its team cannot."""
        team = self.teams.get(name)
        if team is None or team.arrived or self.closed:
            return
        if len(team.members) > 1:
            for other in team.members:
                self.members[other].failed(self, "a member's connection broke")
            return
        self.waiting.discard(id(team))
        self._check()

    def time_out(self) -> None:
        """The time limit of the reduce is over: a member without a result votes against."""
        if not self.closed:
            for name in self.plan.members:
                self.members[name].failed(self, "the exchange took too long")
