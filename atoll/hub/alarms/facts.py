"""The input of alarm rules: values of one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.hub.quotas.ledger import Use
from atoll.hub.rounds.timeline import CatchUp, Row
from atoll.hub.swarm.view import SwarmView
from atoll.ids import machine_names
from atoll.wire.states import RoundMemberState

Curve = Sequence[tuple[float, float]]
"""(Unix time, loss), oldest first, evenly spaced in rounds; early points may be merged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One member of a job."""

    member: str
    node: str
    state: str
    round_state: RoundMemberState | None = None
    """None: the job has no rounds, or does not run."""
    aside: bool = False
    """It takes no part in rounds, e.g. a critic."""
    since: float = 0.0
    """Unix time at which this launch was first seen running."""
    error: Mapping[str, str] | None = None
    end: Mapping[str, Any] | None = None
    """Its result with the digests of its final parameters, once it has ended."""


@dataclass(frozen=True, slots=True)
class Mark:
    """An incident of a member."""

    time: float
    member: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """A running or recently ended job."""

    job: str
    state: str
    reason: str = ""
    error: Mapping[str, str] | None = None
    ended: float | None = None
    alone: bool = False
    members: Mapping[str, MemberFacts] = field(default_factory=dict)
    rounds: Sequence[CatchUp] = ()
    """The newest committed rounds, oldest first."""
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Loss of the whole run by member; under "" the mean of all."""
    bad: Sequence[Mark] = ()
    """Losses, norms and contributions that were not finite, oldest first."""
    differs: Sequence[Mark] = ()
    """Members with other parameters or results than the majority."""
    waits_for: Sequence[str] = ()
    waits_s: float = 0.0
    """How long it has waited for them."""
    swarm: SwarmView | None = None
    """Its stages and their members, if it is a SWARM."""

    def who(self, member: str) -> str:
        """Return a member by its machine's name, for people; several of one are distinguished."""
        nodes = {name: known.node for name, known in self.members.items()}
        return machine_names(nodes).get(member, member)

    def node_of(self, member: str) -> str:
        """Return the node of a member, or empty."""
        known = self.members.get(member)
        return known.node if known is not None else ""

    def rows_of(self, member: str, newest: int) -> list[Row]:
        """Return a member's rows of the `newest` last rounds, oldest first."""
        latest = self.rounds[-newest:]
        return [row for one in latest for row in one.rows if row.member == member]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Free space and when it runs out."""

    free_bytes: float
    total_bytes: float = 0.0
    full_in_s: float | None = None
    """Seconds until nothing is left at the present rate; None: no steady decrease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node."""

    node: str
    online: bool = True
    draining: bool = False
    gone_s: float = 0.0
    """Seconds since its last frame, if offline."""
    ran: int = 0
    """Processes that it ran when it was lost."""
    version: str = ""
    torch: str = ""
    jobs: Sequence[str] = ()
    skew_s: float | None = None
    """Its clock minus the hub's; None: unknown."""
    reconnects: int = 0
    """Reconnects of its agent and members in the last ten minutes."""
    disk: Forecast | None = None
    memory: Forecast | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """One queue."""

    queue: str
    ready: int = 0
    dead: int = 0
    fill: float = 0.0
    """Used share of its bound; 0: unbounded."""
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedFacts:
    """A session that was throttled recently, because it exceeded the limit on frames."""

    address: str
    """`JOB/MEMBER`, or a node."""
    frames: int
    """Frames sent in total."""
    paused_s: float
    """Seconds that it was throttled in total."""
    frames_per_s: float = 2_000.0
    """The permitted rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFacts:
    """The hub itself."""

    version: str = ""
    disk: Forecast | None = None
    queues: Sequence[QueueFacts] = ()
    limited: Sequence[LimitedFacts] = ()
    reached: Sequence[Use] = ()
    """Limits that are used up, or because of which something was refused in the last minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All facts of one moment."""

    now: float
    """Unix time."""
    jobs: Sequence[JobFacts] = ()
    nodes: Sequence[NodeFacts] = ()
    hub: HubFacts = field(default_factory=HubFacts)
