"""Messages of rounds (join, plan, vote, verdict) and of checkpoints."""

from __future__ import annotations

from atoll.wire.member_messages import Lease
from atoll.wire.message import Message


class Roster(Message, frozen=True):
    """Ask for the live members of the job and their addresses."""


class Peer(Message, frozen=True):
    """A live member of a job."""

    member: str
    dial: list[str]


class RosterReply(Message, frozen=True):
    """Answer to `Roster`: live members in slot order."""

    peers: list[Peer]


class MemberStats(Message, frozen=True):
    """Statistics of a member's period and previous round; None: unknown."""

    phases: dict[str, float] = {}
    """Seconds of the previous round on this member: `wait` (join to plan), `send` (the exchange),
    `vote` (vote to verdict), `apply`."""
    update_norm: float | None = None
    """L2 norm of its contribution, before encoding."""
    loss: float | None = None
    """Mean loss over its steps since the last round, nats per token."""


class RoundJoin(Message, frozen=True):
    """Ask to take part in a round; answered by `RoundPlan` on quorum or deadline."""

    round: int
    base: str
    """Digest of the committed state that this member holds."""
    reachable: list[str] = []
    """Members that accepted a connection at `dial`; empty if only the relay is allowed."""
    tokens: int = 0
    """Tokens trained in total, for the record."""
    steps: int = 0
    busy_s: float = 0.0
    """Compute seconds of those steps."""
    stats: MemberStats | None = None
    """Statistics for the dashboard and the alarms."""
    lease: Lease | None = None
    """Current position in the data; recorded if the round commits with this member."""
    closing: int = 0
    """SWARM: the closing of the member's stage that it knows, see `SwarmNews`."""


class RoundPlan(Message, frozen=True):
    """Members and route of one attempt, the same for every member of the epoch."""

    job: str
    round: int
    epoch: int
    """Increases with every plan of the job; identifies this attempt."""
    members: list[str]
    """In slot order; a member's rank is its index."""
    route: str
    """alone, direct, relay or hierarchical."""
    reducer: str = ""
    """Session id of the reducer, on the relay and the hierarchical route."""
    store: str = ""
    """host:port of the store of `members[0]`, on the direct route."""
    timeout_s: float = 60.0
    """Time limit of the reduce, derived from measured rounds."""
    stopping: bool = False
    """A stop was requested: this is the job's last round."""
    saving: bool = False
    """Members save the state after this round, if it commits."""
    sites: list[list[str]] = []
    """Hierarchical route: groups of members that reach each other; the first of each relays."""
    stores: list[str] = []
    """Hierarchical route: host:port of the store of each site; empty for a site of one member."""
    group: int = 0
    """Members of a job may meet in several groups at once, e.g. one per stage of a SWARM; epochs
    are unique in the job."""


class RoundVote(Message, frozen=True):
    """Ask for the verdict; reports whether the reduce succeeded, and the digest of its result."""

    round: int
    epoch: int
    ok: bool
    digest: str = ""
    contributors: list[str] = []
    reason: str = ""
    lease: Lease | None = None
    """Current position in the data; recorded if the round commits with this member."""


class Verdict(Message, frozen=True):
    """The durable decision on one attempt of a round."""

    round: int
    epoch: int
    committed: bool
    digest: str = ""
    contributors: list[str] = []
    reason: str = ""
    leases: dict[str, Lease] = {}
    """Data that each member trains on until the next verdict."""
    pace: dict[str, float] = {}
    """Share of a period's steps per member, by measured speed; 1.0 if not named."""
    group: int = 0
    """As in the plan."""


class MemberLost(Message, frozen=True):
    """Notice of the hub to reducers and members: stop waiting for this member."""

    job: str
    epoch: int
    member: str


class CheckpointPart(Message, frozen=True):
    """A member reports that the hub has its part of this round's checkpoint."""

    round: int
    step: int
    name: str
    sha256: str
    nbytes: int


class CheckpointState(Message, frozen=True):
    """Answer: whether the checkpoint is published (all parts uploaded, manifest written)."""

    published: bool
