"""What rules look at: values gathered from what the hub knows anyway, at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.hub.rounds.timeline import CatchUp, Row

Curve = Sequence[tuple[float, float]]
"""(seconds since 1970, loss), oldest first, evenly spaced in rounds; an early part is coarser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One member of a job."""

    member: str
    node: str
    state: str
    standing: str = ""
    aside: bool = False
    """It takes no part in rounds."""
    since: float = 0.0
    """When this launch of it was first seen at work."""
    error: Mapping[str, str] | None = None
    digest: str = ""
    """Of its parameters, with how many rounds they have seen; from its last words."""
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened to a member."""

    time: float
    member: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job that runs, or has ended not long ago."""

    job: str
    state: str
    reason: str = ""
    error: Mapping[str, str] | None = None
    ended: float | None = None
    alone: bool = False
    """Every member trains its own model."""
    members: Mapping[str, MemberFacts] = field(default_factory=dict)
    rounds: Sequence[CatchUp] = ()
    """The newest committed rounds, oldest first."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """The loss of the whole run, by member; under "" the mean of all."""
    bad: Sequence[Mark] = ()
    """Losses, norms and contributions that were not finite, oldest first."""
    differs: Sequence[Mark] = ()
    """Members that held other replicas or results than the rest."""
    waits_for: Sequence[str] = ()
    """Members that the next round waits for."""
    waits_s: float = 0.0
    """For how long by now."""

    def who(self, member: str) -> str:
        """Return a member with its machine, for people."""
        node = self.node_of(member)
        return f"{member} on {node}" if node else member

    def node_of(self, member: str) -> str:
        """Return the machine that a member runs on."""
        known = self.members.get(member)
        return known.node if known is not None else ""

    def rows_of(self, member: str, newest: int) -> list[Row]:
        """Return a member's part in the newest rounds, oldest first."""
        latest = self.rounds[-newest:]
        return [row for one in latest for row in one.rows if row.member == member]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How something that can run out develops."""

    free_bytes: float
    total_bytes: float = 0.0
    """0: not known."""
    full_in_s: float | None = None
    """Seconds until nothing is left, if it goes on like that; None: it does not shrink steadily."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One machine."""

    node: str
    online: bool = True
    draining: bool = False
    gone_s: float = 0.0
    """Since when it was not heard of, if it is not online."""
    ran: int = 0
    """Processes that it ran when it was lost."""
    version: str = ""
    torch: str = ""
    jobs: Sequence[str] = ()
    """Jobs of which it runs a member."""
    skew_s: float | None = None
    """Its clock minus the hub's; None: not told."""
    reconnects: int = 0
    """Lost connections of its agent and its members in the last ten minutes."""
    disk: Forecast | None = None
    memory: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """One queue."""

    queue: str
    ready: int = 0
    dead: int = 0
    fill: float = 0.0
    """Share of its bound that is used; 0: no bound."""
    waiting: int = 0
    """Producers that wait for room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFacts:
    """The hub itself."""

    version: str = ""
    disk: Forecast | None = None
    queues: Sequence[QueueFacts] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is known at one moment."""

    now: float
    """Seconds since 1970."""
    jobs: Sequence[JobFacts] = ()
    nodes: Sequence[NodeFacts] = ()
    hub: HubFacts = field(default_factory=HubFacts)
