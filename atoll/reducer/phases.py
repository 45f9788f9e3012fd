"""The state of one plan at the reducer: its exchanges and their outcomes."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from atoll.errors import AtollError
from atoll.reducer.assembly import Assembly
from atoll.reducer.early import EarlyMean
from atoll.reducer.results import ExchangeOutcome
from atoll.wire.messages import RoundPlan


@dataclass(slots=True)
class Phase:
    """One exchange of an epoch."""

    number: int
    assembly: Assembly
    early: EarlyMean
    refused: dict[str, AtollError] = field(default_factory=dict)
    computing: bool = False
    outcome: ExchangeOutcome | None = None
    error: AtollError | None = None
    streams: dict[str, Future[int]] = field(default_factory=dict)
    early_streams: list[Future[int]] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether it has an outcome or an error."""
        return self.outcome is not None or self.error is not None

    def cancel(self) -> None:
        """Stop sending its result."""
        for stream in [*self.streams.values(), *self.early_streams]:
            stream.cancel()


@dataclass(slots=True)
class Epoch:
    """One plan and its exchanges so far.

    An exchange may begin when the one before it is over, which bounds the memory that members can
    make the reducer use. It is forgotten once every remaining member has sent something for a later
    one and therefore has its result.
    """

    plan: RoundPlan
    deadline: float
    """Monotonic time limit of the current exchange."""
    lost: set[str] = field(default_factory=set)
    phases: dict[int, Phase] = field(default_factory=dict)
    released: int = 0
    """Exchanges before this number are forgotten."""
    _reached: dict[str, int] = field(default_factory=dict)
    """Member -> the last exchange that it has sent something for."""

    def may_begin(self, number: int) -> bool:
        """Return whether an exchange is under way or may begin."""
        before = self.phases.get(number - 1)
        return number in self.phases or number == self.released == 0 or (
            before is not None and before.finished
        )  # fmt: skip

    def open(self, number: int, *, all_to_all: bool, max_bytes: int) -> None:
        """Begin an exchange, without the members lost so far.

        On the hierarchical route each member sends for itself in an all-to-all, else one per site.
        """
        plan = self.plan
        sites: dict[str, tuple[str, ...]] = {}
        if plan.route == "hierarchical" and not all_to_all:
            sites = {site[0]: tuple(site) for site in plan.sites if site}
        assembly = Assembly(list(sites) or plan.members, sites=sites, max_bytes=max_bytes)
        for member in self.lost:
            assembly.drop(member)
        self.phases[number] = Phase(number, assembly, EarlyMean(plan, assembly))

    def advance(self, member: str, number: int) -> None:
        """Note that a member sends for an exchange; forget exchanges that all members have left."""
        self._reached[member] = max(self._reached.get(member, 0), number)
        left = [name for name in self.plan.members if name not in self.lost]
        self.released = max(
            self.released, min((self._reached.get(name, 0) for name in left), default=0)
        )
        for done in [phase for phase in self.phases if phase < self.released]:
            self.phases.pop(done).cancel()
