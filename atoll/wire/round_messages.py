"""Messages of a round: join, plan, vote, verdict; and of checkpoints."""

from __future__ import annotations

from atoll.wire.member_messages import Lease
from atoll.wire.message import Message


class Roster(Message, frozen=True):
    """Ask: who is in my job, and where can they be dialled?"""


class Peer(Message, frozen=True):
    """A live member of a job."""

    member: str
    dial: list[str]


class RosterReply(Message, frozen=True):
    """Answer to `Roster`: live members in slot order."""

    peers: list[Peer]


class MemberStats(Message, frozen=True):
    """What a member tells of its period and of the round before it; None: unknown."""

    phases: dict[str, float] = {}
    """Seconds of the round before this one, as it went here: `wait` (from its join to its plan),
    `send` (the exchange), `vote` (from its vote to its verdict), `apply`."""
    update_norm: float | None = None
    """L2 norm of what it wants to contribute, before encoding."""
    loss: float | None = None
    """Mean loss over its steps since the last round, nats per token."""


class RoundJoin(Message, frozen=True):
    """Ask to take part in a round; answered by `RoundPlan` when all are there or time is up."""

    round: int
    base: str
    """Digest of the committed state that this member stands on."""
    reachable: list[str] = []
    """Members whose `dial` answered; empty when only the relay is wanted."""
    tokens: int = 0
    """Tokens trained in all, for the record."""
    steps: int = 0
    """Optimizer steps of this member since the last round."""
    busy_s: float = 0.0
    """Seconds they took."""
    account: MemberStats | None = None
    """What else it tells of the period, for people and alarms."""
    lease: Lease | None = None
    """Where this member's data stands now; counts if the round is committed with it."""


class RoundPlan(Message, frozen=True):
    """Who meets, how. The same for every member of the epoch."""

    job: str
    round: int
    epoch: int
    """Grows with every plan of the job; names this attempt."""
    members: list[str]
    """In slot order; a member's rank is its index."""
    route: str
    """alone, direct, relay or hierarchical."""
    reducer: str = ""
    """Session id of the reducer, on the relay and the hierarchical route."""
    store: str = ""
    """host:port of the store of `members[0]`, on the direct route."""
    timeout_s: float = 60.0
    """Time that the reduce may take, from measured rounds."""
    stopping: bool = False
    """The job ends with this round: a stop was asked for."""
    sites: list[list[str]] = []
    """On the hierarchical route: members that reach each other, the first of each relays."""
    stores: list[str] = []
    """On the hierarchical route: host:port of the store of each site; empty for one member."""


class RoundVote(Message, frozen=True):
    """Ask for the verdict: my reduce went well (or not), its result has this digest."""

    round: int
    epoch: int
    ok: bool
    digest: str = ""
    contributors: list[str] = []
    reason: str = ""
    lease: Lease | None = None
    """Where this member's data stands now; counts if the round is committed with it."""


class Verdict(Message, frozen=True):
    """The one durable decision about an attempt of a round."""

    round: int
    epoch: int
    committed: bool
    digest: str = ""
    contributors: list[str] = []
    reason: str = ""
    leases: dict[str, Lease] = {}
    """What each member trains on until the next verdict."""
    pace: dict[str, float] = {}
    """Share of a period's steps that each member does, by measured speed; 1.0 if not named."""


class MemberLost(Message, frozen=True):
    """Notice of the hub to a reducer and to members: it is gone, wait for it no more."""

    job: str
    epoch: int
    member: str


class CheckpointPart(Message, frozen=True):
    """A member says: my part of the checkpoint of this round lies at the hub."""

    round: int
    step: int
    name: str
    sha256: str
    nbytes: int


class CheckpointState(Message, frozen=True):
    """Answer: whether the checkpoint is published (all parts there, manifest written)."""

    published: bool
