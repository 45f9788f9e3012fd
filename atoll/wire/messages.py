"""Every control message, as frozen structs: the whole protocol can be read here.

A control frame carries one `Envelope`. `id > 0` with `reply=False` asks; the answer has the same
id and `reply=True`; `id == 0` is a notice that nobody answers. Requests may be sent again after a
reconnect, with the same content: every handler MUST be idempotent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from atoll.errors import WireError
from atoll.wire.frames import Frame, Kind, encode
from atoll.wire.malformed import MALFORMED


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of every message; the class name is its tag on the wire."""


# ------------------------------------------------------------------------------ session


class Hello(Message, frozen=True):
    """First message of every connection. `info` describes a node (see `NodeInfo`)."""

    protocol: int
    version: str
    session: str
    """Own address: a node id, `job/w3` for a member, `job/reducer`."""
    token: str
    incarnation: str
    """Random per process: a new one under the same session replaces the old process."""
    info: NodeInfo | None = None


class Welcome(Message, frozen=True):
    """The hub's answer to `Hello`."""

    version: str
    window_bytes: int
    heartbeat_s: float
    resumed: bool
    """The hub knew this incarnation already (a reconnect)."""


class Failure(Message, frozen=True):
    """The answer to a request that could not be done: `AtollError.to_dict()`."""

    error: dict[str, str]


class Done(Message, frozen=True):
    """The answer to a request that has nothing to tell."""


class Beat(Message, frozen=True):
    """Notice: I live. `stats` are figures for the dashboard (cpu, memory, sent_bytes, ...)."""

    stats: dict[str, float] = {}


class Credit(Message, frozen=True):
    """Notice of the hub to a sender: `nbytes` of relay frames to `to` have left the hub."""

    to: str
    nbytes: int


class Undeliverable(Message, frozen=True):
    """Notice of the hub to a sender: nobody is at address `to`; the frame was dropped."""

    to: str


class NodeInfo(Message, frozen=True):
    """What a machine is and offers."""

    hostname: str
    system: str
    python: str
    atoll: str
    torch: str = ""
    cores: int = 0
    memory_bytes: int = 0
    disk_free_bytes: int = 0
    gpu: str = ""
    slots: int = 1
    """How many workers it takes at once."""
    matmul_gflops: float = 0.0


# -------------------------------------------------------------------------------- queue


class QueuePut(Message, frozen=True):
    """Ask: store an item. The same `key` again is accepted and stored once."""

    queue: str
    key: str
    payload: bytes


class QueuePutDone(Message, frozen=True):
    """Answer: the item is durable. `duplicate`: the key was there already."""

    seq: int
    duplicate: bool


class QueueClaim(Message, frozen=True):
    """Ask: lease up to `limit` items for `lease_s`; waits up to `wait_s` for the first."""

    queue: str
    lease_s: float
    limit: int = 1
    wait_s: float = 0.0


class QueueItem(Message, frozen=True):
    """One leased item. `attempt` counts from 1; `lease` names this claim."""

    seq: int
    key: str
    payload: bytes
    attempt: int
    lease: str


class QueueItems(Message, frozen=True):
    """Answer to a claim; empty when nothing came in time."""

    items: list[QueueItem]


class QueueAck(Message, frozen=True):
    """Ask: the item is done; never give it out again."""

    queue: str
    lease: str


class QueueExtend(Message, frozen=True):
    """Ask: the lease now ends `lease_s` from now."""

    queue: str
    lease: str
    lease_s: float


class QueueRelease(Message, frozen=True):
    """Ask: give the item back (counts as an attempt; too many make it a dead letter)."""

    queue: str
    lease: str
    reason: str = ""


# --------------------------------------------------------------------------- jobs, nodes


class Launch(Message, frozen=True):
    """Command to a node (an item of queue `node/ID`): start one process of a job."""

    job: str
    member: str
    """`w0`, `w1`, ... or `reducer`."""
    slot: int
    token: str
    spec: str
    """The job's TOML text, resolved."""
    files: dict[str, str] = {}
    """File name -> text: the user's own script travels here."""
    attempt: int = 1


class Stop(Message, frozen=True):
    """Command to a node: end one process of a job; kill it after `grace_s`."""

    job: str
    member: str
    grace_s: float = 10.0
    attempt: int = 0
    """Which attempt is meant; 0: whichever runs."""


class ProcessState(Message, frozen=True):
    """A node tells: a process of a job changed its state."""

    job: str
    member: str
    state: str
    """starting, running, exited."""
    exit_code: int | None = None
    error: dict[str, str] | None = None
    tail: list[str] = []
    """Last lines it printed, when it failed."""
    attempt: int = 0
    """Which attempt it was; 0: unknown."""


class LogLines(Message, frozen=True):
    """A node ships lines that a process printed; `seq` numbers the first line from 1."""

    job: str
    member: str
    seq: int
    lines: list[str]


class Acked(Message, frozen=True):
    """Answer: everything up to and including `seq` is durable."""

    seq: int


class Point(Message, frozen=True):
    """One measurement of a member. `values` e.g. loss, tokens, step_s, compute_s."""

    time: float
    step: int
    round: int
    values: dict[str, float]


class Metrics(Message, frozen=True):
    """A member ships measurements; `seq` numbers the first point from 1 (per incarnation)."""

    incarnation: str
    seq: int
    points: list[Point]


class Event(Message, frozen=True):
    """A member or a node reports something that happened, for people."""

    kind: str
    text: str
    fields: dict[str, str] = {}


class Finished(Message, frozen=True):
    """A member is done with its job and leaves; `result` is its part of the summary."""

    ok: bool
    result: dict[str, Any] = {}
    error: dict[str, str] | None = None


# ---------------------------------------------------------------------- members, rounds


class Register(Message, frozen=True):
    """A member enters its job. `dial` are the host:port where its store listens, or empty."""

    dial: list[str] = []
    state: list[str] = []
    """host:port where it serves the committed state to newcomers; empty: only through the hub."""


class Lease(Message, frozen=True):
    """A stretch of the data that one member trains on until the next verdict.

    `cursor` is the place where the slot stands in the committed record; empty: its beginning.
    """

    slot: int
    cursor: dict[str, int] = {}


class Registered(Message, frozen=True):
    """Answer: the slot it leases, and where the group stands."""

    slot: int
    num_slots: int
    committed_round: int
    """Rounds committed so far; the next one to join."""
    stopping: bool
    resume_round: int = -1
    """Round of the checkpoint to start from; -1: start fresh."""
    recover: bool = False
    """The run is under way: take over the committed state before the first step (`Recover`)."""
    lease: Lease | None = None
    """What to train on until the first verdict; None: the own slot from its beginning."""


class Recover(Message, frozen=True):
    """Ask: I lack the committed state; who has it?"""

    failed: list[str] = []
    """Members that gave nothing usable in this recovery."""
    ready: bool = True
    """It can load the state as soon as it has it: rounds may wait for that. Not while it is still
    starting and only fetches ahead."""


class Source(Message, frozen=True):
    """A live member that stands on the committed state."""

    member: str
    state: list[str] = []
    """host:port where it serves it; empty: only through the hub."""


class Sources(Message, frozen=True):
    """Answer to `Recover`. Rounds wait (a bounded time) for whoever asked."""

    round: int
    """Rounds committed: the state to take, and the next round to join."""
    peers: list[Source] = []
    """In slot order. Empty: take the checkpoint."""
    checkpoint_round: int = -1
    """The newest complete checkpoint. Without peers the run is set back to it; -1: start fresh."""
    pace: float = 1.0
    """Share of a period's steps to do before the next round, so as to arrive with the others."""
    lease: Lease | None = None


class Standing(Message, frozen=True):
    """A member tells: I have taken over the committed state, and stand on it."""

    round: int
    base: str
    sources: list[str] = []
    """Who gave it: members, or `checkpoint`."""
    seconds: float = 0.0
    nbytes: int = 0


class Leaving(Message, frozen=True):
    """A member tells that it leaves for good, e.g. on a preemption notice; nobody waits for it."""

    reason: str = ""


class Drain(Message, frozen=True):
    """A node tells that it will go away soon: give it no new work (or, `False`, again)."""

    draining: bool = True
    reason: str = ""


class Roster(Message, frozen=True):
    """Ask: who is in my job, and where can they be dialled?"""


class Peer(Message, frozen=True):
    """A live member of a job."""

    member: str
    dial: list[str]


class RosterReply(Message, frozen=True):
    """Answer to `Roster`: live members in slot order."""

    peers: list[Peer]


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


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What one control frame carries."""

    id: int
    reply: bool
    body: (
        Hello | Welcome | Failure | Done | Beat | Credit | Undeliverable
        | QueuePut | QueuePutDone | QueueClaim | QueueItem | QueueItems | QueueAck | QueueExtend
        | QueueRelease | Launch | Stop | ProcessState | LogLines | Acked | Metrics | Event
        | Finished | Register | Registered | Roster | RosterReply | RoundJoin | RoundPlan
        | RoundVote | Verdict | MemberLost | CheckpointPart | CheckpointState
        | Lease | Recover | Source | Sources | Standing | Leaving | Drain
    )  # fmt: skip


Body = Message
Command = Launch | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_commands: msgspec.msgpack.Decoder[Launch | Stop] = msgspec.msgpack.Decoder(Launch | Stop)


def pack(body: Message, *, id: int = 0, reply: bool = False) -> bytes:
    """Return the control frame of a message.

    Raises:
        WireError: it holds what msgpack cannot carry, e.g. an object in `Finished.result`.
        FrameTooLarge: it is over the limit of control frames.
    """
    try:
        encoded = _encoder.encode([id, reply, body])
    except MALFORMED as error:
        raise WireError(
            f"a {type(body).__name__} cannot be sent",
            given=str(error),
            expected="text, numbers, lists and dicts",
        ) from error
    return encode(Kind.CONTROL, encoded)


def unpack(frame: Frame) -> Envelope:
    """Return the envelope in a control frame.

    Raises:
        WireError: the body is not a message of this protocol; says which field is wrong.
    """
    try:
        return _decoder.decode(frame.body)
    except MALFORMED as error:
        raise WireError("a control message is malformed", given=str(error)) from error


def pack_command(command: Command) -> bytes:
    """Return the queue payload of a command to a node."""
    return _encoder.encode(command)


def unpack_command(payload: bytes) -> Command:
    """Return the command in a queue payload.

    Raises:
        WireError: it is not a command.
    """
    try:
        return _commands.decode(payload)
    except MALFORMED as error:
        raise WireError("a command is malformed", given=str(error)) from error
