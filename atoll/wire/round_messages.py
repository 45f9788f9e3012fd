"""Messages of rounds (join, plan, vote, verdict), of their verification, and of checkpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec

from atoll.wire.member_messages import Lease
from atoll.wire.message import Digest, Finite, Message, Name, Number

MOST_LINES = 64
"""Most members among which links are measured; in a larger group no link is."""

MOST_DIGESTS, MOST_REASON = 100_000, 1_000
"""Limits of a `VerificationAnswer`: digests, one per step, and characters of `failed`."""

MOST_MARKS = 64
"""Digests of states in one commitment."""

TripSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
BytesPerSecond = Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]

Line = tuple[TripSeconds, BytesPerSecond]
"""Round trip in seconds and bytes per second, from one member to another."""


class Roster(Message, frozen=True):
    """Ask for the live members of the job and their addresses."""


class Peer(Message, frozen=True):
    """A live member of a job."""

    member: str
    dial: list[str]
    identity: str = ""
    """As in `Register`."""


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
    sent_bytes: float | None = None
    """What it sent in its previous round, on any route."""


class Commitment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member's claim of what it computed in a round, made before members are drawn for checks.

    Digests are 32 hex digits (BLAKE3). A *state* is the model with the member's own part: the
    optimizer's tensors.
    """

    step: Number
    """Step of the schedule at which the period began."""
    length: Number
    """Steps of the schedule until the round."""
    steps: Number
    """Optimizer steps that the member took in them."""
    slot: Number
    """Data slot that it read, from `cursor` on; an empty one: from its beginning."""
    cursor: Annotated[dict[Name, Number], msgspec.Meta(max_length=16)] = {}
    opening: Digest = ""
    """Digest of the member's own part before the first step."""
    closing: Digest = ""
    """Digest of the member's own part after the last step."""
    marks: Annotated[list[Digest], msgspec.Meta(max_length=MOST_MARKS)] = []
    """Digests of the states after the marked steps, see `verification/trace.py`."""
    contribution: Digest = ""
    """Digest of the update, before it is encoded."""
    arithmetic: Name = ""
    """Processor type and library versions: members that name the same one compute the same bits."""


class RoundJoin(Message, frozen=True):
    """Ask to take part in a round; answered by `RoundPlan` on quorum or deadline."""

    round: Number
    base: Digest
    """Digest of the committed state that this member holds."""
    reachable: Annotated[list[Name], msgspec.Meta(max_length=10_000)] = []
    """Members that accepted a connection at `dial`; empty if only the relay is allowed."""
    lines: Annotated[dict[Name, Line], msgspec.Meta(max_length=MOST_LINES)] = {}
    """Member -> what was measured from it to this one."""
    tokens: Number = 0
    """Tokens trained in total, for the record."""
    steps: Number = 0
    busy_s: Finite = 0.0
    """Compute seconds of those steps."""
    stats: MemberStats | None = None
    """Statistics for the dashboard and the alarms."""
    lease: Lease | None = None
    """Current position in the data; recorded if the round commits with this member."""
    closing: Number = 0
    """SWARM: the closing of the member's stage that it knows, see `SwarmNews`."""
    group: Number = -1
    """SWARM: the stage whose members meet, for one that holds several stages; -1: its only one."""
    commitment: Commitment | None = None
    """Only in jobs whose rounds are verified."""


class RoundPlan(Message, frozen=True):
    """Members and route of one attempt, the same for every member of the epoch."""

    job: str
    round: Number
    epoch: Number
    """Increases with every plan of the job; identifies this attempt."""
    members: list[str]
    """In slot order; a member's rank is its index."""
    route: str
    """alone, direct, relay or hierarchical."""
    reducer: str = ""
    """Session id of the reducer, on the relay and the hierarchical route."""
    store: str = ""
    """host:port of the store of `members[0]`, on the direct route."""
    timeout_s: Finite = 60.0
    """Time limit of the reduce, derived from measured rounds."""
    stopping: bool = False
    """A stop was requested: this is the job's last round."""
    saving: bool = False
    """Members save the state after this round, if it commits."""
    verified: bool = False
    """The reducer reports the digests of what it gets, see `Received`."""
    unweighted: list[str] = []
    """Members with a strike: they take part, but what they contribute has no weight."""
    sites: list[list[str]] = []
    """Hierarchical route: groups of members that reach each other; the first of each relays."""
    stores: list[str] = []
    """Hierarchical route: host:port of the store of each site; empty for a site of one member."""
    ring: list[str] = []
    """Direct route: the members in the order of rings and trees; empty: as in `members`."""
    collective: str = ""
    """Direct route: the collective of plain values, as replanned; empty: as in the job file."""
    group: Number = 0
    """Members of a job may meet in several groups at once, e.g. one per stage of a SWARM; epochs
    are unique in the job."""


class RoundVote(Message, frozen=True):
    """Ask for the verdict; reports whether the reduce succeeded, and the digest of its result."""

    round: Number
    epoch: Number
    ok: bool
    digest: Digest = ""
    contributors: list[Name] = []
    reason: str = ""
    lease: Lease | None = None
    """Current position in the data; recorded if the round commits with this member."""
    report: RoundJoin | None = None
    """Replaces the report in the join, if the member joined before its last steps."""
    nbytes: Number = 0
    """Of what the member put into the exchange, encoded: on every route the same."""


class Verdict(Message, frozen=True):
    """The durable decision on one attempt of a round."""

    round: Number
    epoch: Number
    committed: bool
    digest: str = ""
    contributors: list[str] = []
    reason: str = ""
    leases: dict[str, Lease] = {}
    """Data that each member trains on until the next verdict."""
    pace: dict[str, Finite] = {}
    """Share of a period's steps per member, by measured speed; 1.0 if not named."""
    delay: Number = 0
    """Steps that hide a round which runs beside training, by measured times; 0: unknown."""
    every: Number = 0
    """Steps between two rounds from now on, as replanned; 0: as in the job file."""
    codec: Name = ""
    """Codec that `auto` selects from now on, as replanned; empty: by the members' measurements."""
    group: Number = 0
    """As in the plan."""


class MemberLost(Message, frozen=True):
    """Notice of the hub to reducers and members: stop waiting for this member."""

    job: str
    epoch: Number
    member: str


class Look(msgspec.Struct, frozen=True):
    """Norm of a contribution and its similarity to others, on a sample of its elements."""

    norm: Finite
    alike: Finite
    """Largest cosine with another member's contribution, or with its own of the round before."""
    along: Finite = 0.0
    """Cosine with the sum of the others' directions."""


class Received(Message, frozen=True):
    """The reducer reports what it got from the members, before it sends them the mean."""

    epoch: Number
    packets: dict[str, str]
    """Member -> digest of codec, weight and bytes of its contribution."""
    looks: dict[str, Look] = {}


class VerificationTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member's task in a challenge; for `kind` see `atoll/verification/challenge.py`."""

    challenge: Number
    kind: str
    member: str
    """The challenged member; its round is computed again."""
    round: Number
    step: Number = 0
    length: Number = 0
    steps: Number = 0
    slot: Number = 0
    cursor: dict[str, Number] = {}
    first: Number = 0
    last: Number = 0
    """Steps of the period: digests are wanted after `first`, up to `last`. A judge begins with the
    state after `first`, all others with the one at the opening."""


class VerificationAsk(Message, frozen=True):
    """A member asks for its tasks in challenges; answered at once."""

    doing: Annotated[list[Number], msgspec.Meta(max_length=MOST_LINES)] = []
    """Challenges that it is working on, so that it does not count as late."""


class VerificationWork(Message, frozen=True):
    """Answer to `VerificationAsk`."""

    tasks: list[VerificationTask] = []
    drawn: Number = -1
    """Last round for which the challenged members were drawn."""


class VerificationAnswer(Message, frozen=True):
    """A member's result of a task; answered by `Done`, even if the challenge is over."""

    challenge: Number
    kind: str
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MOST_DIGESTS)] = []
    """Of the states after the marked steps, or after every step of a part."""
    closing: Digest = ""
    contribution: Digest = ""
    packet: Digest = ""
    """Digest of the contribution as the reducer would report it."""
    gains: Annotated[list[Finite], msgspec.Meta(max_length=2)] = []
    """Relative decrease of the loss by the contribution, on the member's own and held-out data."""
    failed: Annotated[str, msgspec.Meta(max_length=MOST_REASON)] = ""
    """Why it cannot be done here."""
    unusable: bool = False
    """It failed because of the state that was handed over: no member could begin with it."""


class CheckpointPart(Message, frozen=True):
    """A member reports that the hub has its part of this round's checkpoint."""

    round: Number
    step: Number
    name: str
    sha256: str
    nbytes: Number


class CheckpointState(Message, frozen=True):
    """Answer: whether the checkpoint is published (all parts uploaded, manifest written)."""

    published: bool
