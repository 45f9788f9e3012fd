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
    contributors: list[str] = field(default_factory=list)
    closed: bool = False
    complete: bool = False

    def __post_init__(self) -> None:
        plan = self.plan
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
        delegate = hub.members[team.members[0]]
        if self.relays:
            now = hub.network.relayed_in(delegate, now, hub.setting.exchange_bytes)
        scheduler.at(now, lambda: self._arrive(team))

    def _inside_s(self, team: Team, member: SimulatedMember) -> float:
        """Return the seconds of the reduce inside a team, by a ring of all its members."""
        count, hub = len(team.members), self.hub
        if count == 1:
            return 0.0
        nbytes = 2 * (count - 1) / count * hub.setting.exchange_bytes
        rates = [hub.members[m].inside_bps(hub.members[team.members[0]]) for m in team.members]
        hub.record.events["bytes inside sites"] += round(nbytes * count)
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
        last = self.contributors[-1] if self.contributors else ""
        hub.record.late[last] += 1
        size = hub.setting.exchange_bytes
        order = {member: place for place, member in enumerate(self.plan.members)}
        self.contributors.sort(key=order.__getitem__)
        if len(self.contributors) == len(self.plan.members):
            self.contributors = self.plan.members
        done: set[int] = set()
        for name in self.plan.members:
            team = self.teams[name]
            if id(team) in done or not team.arrived:
                continue
            done.add(id(team))
            now = scheduler.now
            delegate = hub.members[team.members[0]]
            if self.relays:
                now = hub.network.relayed_out(delegate, now, size)
            for other in team.members:
                member, extra_s = hub.members[other], 0.0
                if len(team.members) > 1 and self.relays and other != delegate.name:
                    extra_s = 8 * size / member.inside_bps(delegate)
                scheduler.at(now + extra_s, partial(member.resulted, self), member.process)

    def drop(self, name: str) -> None:
        """The hub waits for a member no longer: the reducer leaves it out, its team cannot."""
        team = self.teams.get(name)
        if team is None or team.arrived or self.closed:
            return
        if len(team.members) > 1:
            for other in team.members:
                self.hub.members[other].failed(self, "a member's connection broke")
            return
        self.waiting.discard(id(team))
        self._check()

    def time_out(self) -> None:
        """The time limit of the reduce is over: who has no result votes against."""
        if not self.closed:
            for name in self.plan.members:
                self.hub.members[name].failed(self, "the exchange took too long")
