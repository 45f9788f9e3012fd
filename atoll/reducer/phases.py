"""One plan at the reducer: its exchanges, one after the other, and what became of each."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from atoll.errors import AtollError
from atoll.reducer.assembly import Assembly
from atoll.reducer.results import ExchangeOutcome
from atoll.wire.messages import RoundPlan


@dataclass(slots=True)
class Phase:
    """One exchange of an epoch."""

    number: int
    assembly: Assembly
    refused: dict[str, AtollError] = field(default_factory=dict)
    computing: bool = False
    outcome: ExchangeOutcome | None = None
    error: AtollError | None = None
    streams: dict[str, Future[int]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        """Whether it has come to something."""
        return self.outcome is not None or self.error is not None

    def forget(self) -> None:
        """Send nothing of it any more."""
        for stream in self.streams.values():
            stream.cancel()


@dataclass(slots=True)
class Epoch:
    """One plan, and its exchanges as far as they have begun.

    An exchange can begin when the one before it is over, so nobody can make the reducer keep more
    than the members together have come to; and it is forgotten once every member that is left has
    sent something for a later one, hence has its result.
    """

    plan: RoundPlan
    deadline: float
    """Monotonic time until which the present exchange may take."""
    lost: set[str] = field(default_factory=set)
    phases: dict[int, Phase] = field(default_factory=dict)
    gone: int = 0
    """Exchanges that are forgotten: all before this one."""
    _reached: dict[str, int] = field(default_factory=dict)
    """Member -> the last exchange that it has sent something for."""

    def may_begin(self, number: int) -> bool:
        """Return whether an exchange is under way or can be."""
        before = self.phases.get(number - 1)
        return number in self.phases or number == self.gone == 0 or (
            before is not None and before.over
        )  # fmt: skip

    def open(self, number: int, *, swaps: bool, max_bytes: int) -> None:
        """Begin an exchange; members that were lost are not waited for.

        Args:
            number: Its number in the epoch, from 0.
            swaps: Whether it is a swap: on the hierarchical route each member then comes itself,
                otherwise one for each site.
            max_bytes: Largest contribution taken from one member.
        """
        plan = self.plan
        sites: dict[str, tuple[str, ...]] = {}
        if plan.route == "hierarchical" and not swaps:
            sites = {site[0]: tuple(site) for site in plan.sites if site}
        assembly = Assembly(list(sites) or plan.members, sites=sites, max_bytes=max_bytes)
        for member in self.lost:
            assembly.drop(member)
        self.phases[number] = Phase(number, assembly)

    def reach(self, member: str, number: int) -> None:
        """Note what a member sends for; forget what nobody needs any more."""
        self._reached[member] = max(self._reached.get(member, 0), number)
        left = [name for name in self.plan.members if name not in self.lost]
        self.gone = max(self.gone, min((self._reached.get(name, 0) for name in left), default=0))
        for done in [phase for phase in self.phases if phase < self.gone]:
            self.phases.pop(done).forget()
