"""Messages of a SWARM: between members and the hub's ledger, and between members.

A job of `stages` stages trains on microbatches (step, index). A member of the first stage, the
*driver*, leases a microbatch from the ledger, chooses a *path* (one member per stage), and sends
its activations along the path and the gradients back (`docs/decisions/0009`). Requests to the hub
may be repeated: each has the member's latest `epoch`, and says what it already has.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError
from atoll.wire.malformed import MALFORMED
from atoll.wire.message import Finite, Message, Number


class Holder(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A member since it last announced itself: what it held under an older epoch is lost."""

    member: str
    epoch: Number


class SwarmPeer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member that serves a stage."""

    member: str
    epoch: Number
    stage: Number
    dial: list[str] = []
    """host:port at which it accepts activations; empty: only through the hub."""
    row_s: Finite = 0.0
    """Seconds of one row's forward pass, as the member measured; 0: unknown."""

    @property
    def holder(self) -> Holder:
        """Member and epoch."""
        return Holder(self.member, self.epoch)


class SwarmLease(msgspec.Struct, frozen=True, omit_defaults=True):
    """A microbatch for one driver to take through all stages."""

    step: Number
    index: Number
    lease: Number
    """Number of this lease, unique in the job; pending gradients are kept under it."""
    stages: list[Number] = []
    """Ascending: stages that keep a pending gradient, the way back ends at the first. Empty: an
    evaluation, which ends at the last stage."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A microbatch of the present step, as counted for one stage."""

    index: Number
    lease: Number
    member: str = ""
    """Its holder adds this lease's pending gradient to its sum; others drop theirs of `index` for
    this and older leases, but not newer ones, which may still count. Empty: the holder was lost."""
    copy: Number = 0
    """Above 0: its holder adds the copy of a lost member's sum that it keeps under this number."""


class HeldOutSum(msgspec.Struct, frozen=True, array_like=True):
    """The loss on held-out rows, as sums that can be added."""

    loss_sum: float
    """Nats, over all targets."""
    targets: Number
    """Tokens of text, or classified samples."""
    correct: Number = -1
    """Samples classified correctly; -1: they do not have one class each."""


# ------------------------------------------------------------------------ member <-> ledger


class SwarmAnnounce(Message, frozen=True):
    """A member is ready, asks for a place, or returns after a lost connection."""

    epoch: Number = 0
    """From its last `SwarmPlace`; 0: a new process, or one that has dropped everything."""
    stage: Number = -1
    """Stage that its state belongs to; -1: it has no state."""
    step: Number = -1
    """Steps that its state contains; the next step it computes."""
    folded: list[Share] = []
    """What its sum of this step holds."""
    ahead: list[Share] = []
    """What its sum of the step after holds."""
    agreed: bool = False
    """It holds the mean of its stage or, without a round in every step, knows all its shares."""
    history: Number = 0
    """Of its state, from the `SwarmPlace` that it was recovered for."""
    dial: list[str] = []
    row_s: Finite = 0.0
    """Seconds of one row's forward pass; 0: not measured."""
    unlike: bool = False
    """Its stage cannot be rebuilt from the neighbours: their parameters have other shapes."""
    free_bytes: Number = 0
    """Memory free for parameters, optimizer state and activations; 0: unknown."""
    held_out: list[Number] = []
    """Microbatches of an evaluation in between, and of the one at the end; empty: unknown."""
    evaluate: bool = False
    """Its state is to be evaluated: a rebuilt ledger does not know what was reported before."""
    last: Number = -1
    """Steps after which the job ends, if it was asked to stop and the ledger has announced that."""
    ledger: Number = 0
    """From its last `SwarmPlace`: a rebuilt ledger accepts only reports addressed to it."""


class SwarmPlace(Message, frozen=True):
    """Answer to `SwarmAnnounce`."""

    epoch: Number
    stage: Number
    """Stage to serve; -1: it fits none, announce again later."""
    step: Number
    """Present step of the job."""
    finished: bool = False
    """The job is over: nothing is left to do."""
    ready: bool = False
    """Microbatches of `step` may come; else it recovers the stage, then announces itself again."""
    keep: bool = False
    """`folded` stands; otherwise the sum of this step and all pending gradients are dropped."""
    history: Number = 0
    """Changes when all members go back to a checkpoint, because a stage had lost its last one:
    states of an earlier history are of no use, even of the same step."""
    donors: list[str] = []
    """Members that hold the stage's state; empty: recover from this step's checkpoint, or start."""
    round: Number = 0
    """Rounds that the members of the stage have committed."""
    neighbours: list[list[str]] = []
    """Members of the stages before and after; a lost stage starts from their mean. Mostly empty."""
    serves: dict[str, list[str]] = {}
    """host:port at which donors serve their state; donors not named serve it through the hub."""
    ledger: Number = 0
    """Number of the ledger; one that is new to the member makes it announce itself again."""


class SwarmWant(Message, frozen=True):
    """A driver asks for microbatches; answered when there is one, or after some seconds."""

    epoch: Number
    room: Number
    """How many it can take besides those it holds."""
    holding: list[Number] = []
    """Leases that it works on; others leased to it are sent again."""


class SwarmLeases(Message, frozen=True):
    """Answer to `SwarmWant`."""

    leases: list[SwarmLease]


class SwarmFailure(msgspec.Struct, frozen=True, array_like=True):
    """A member failed at a microbatch, and its driver has banned it."""

    member: str
    reason: str = ""
    banned_s: Finite = 0.0
    """Seconds until the ban ends by itself."""


class SwarmDone(Message, frozen=True):
    """A microbatch has passed all stages; answered by `Done` whether or not it counts."""

    step: Number
    index: Number
    lease: Number
    stages: list[Number] = []
    holders: list[Holder] = []
    """For each of `stages`, the member with the pending gradient."""
    queues: dict[str, Finite] = {}
    """Microbatches waiting at members, as they reported last."""
    row_s: dict[str, Finite] = {}
    """Seconds of one row's forward pass at members, as the driver measured."""
    evaluate: bool = False
    """Evaluate the state of this step: an evaluation is due, and the members of every stage agree
    on the state."""
    held_out: HeldOutSum | None = None
    """What an evaluation found; then `holders` names the member of the last stage."""


class SwarmKept(Message, frozen=True):
    """A member keeps a copy of the sum of another one of its stage; answered by `SwarmKeeps`."""

    epoch: Number
    """The keeper's."""
    of: Holder
    step: Number
    number: Number
    """The keeper's own number of this copy, above 0."""
    shares: list[Share] = []
    """What the sum holds."""


class SwarmKeeps(Message, frozen=True):
    """Answer to `SwarmKept`."""

    used: bool
    """If the member is lost, the keeper gets its shares; older copies are not needed. False: drop
    this copy, and keep older ones until the step is over."""


class SwarmWatch(Message, frozen=True):
    """A member asks for news; answered when there are any, or after some seconds."""

    epoch: Number
    step: Number
    """The member's step."""
    shares: Number = 0
    """Shares of this step that it knows, from 0 again after every `SwarmPlace`; it ignores those
    that are in its sum."""
    ahead: Number = 0
    """Shares of the step after that it knows, counted like `shares`."""
    closing: Number = 0
    """The closing that it knows."""
    table: Number = 0
    """Version of the table that it knows."""
    failures: list[SwarmFailure] = []
    """Members that failed at microbatches since its last question, for people."""
    direct_bytes: Number = 0
    """What it has sent to other members over connections of their own, since it started."""
    relayed_bytes: Number = 0
    """What went through the hub."""


class SwarmNews(Message, frozen=True):
    """Answer to `SwarmWatch`."""

    step: Number
    """Present step; later than the member's: apply the step that it knows to be closed."""
    shares: list[Share] = []
    """Of the asking member's stage and step, after those it knows."""
    ahead: list[Share] = []
    """Of its stage and the step after, after those it knows."""
    closing: Number = 0
    """Above 0: the shares of this stage are complete, and its members meet in the step's round,
    with this number in `RoundJoin.closing`. 0: open, again if a holder was lost. From its join to
    the verdict a member folds nothing."""
    table: Number = 0
    peers: list[SwarmPeer] = []
    """All members that serve a stage, if `table` is newer than the one known."""
    dropped: bool = False
    """The epoch is not the member's present one: it was lost, fell behind, or moves to another
    stage. It announces itself again; the place says what to keep."""
    paused: str = ""
    """Why the job waits, e.g. for a member of a stage; empty: it runs."""
    last: Number = -1
    """Steps after which the job ends, fewer than planned if it was asked to stop; -1: unknown."""
    savers: list[str] = []
    """Members that save the state of `step` in a checkpoint: one of each stage."""
    history: Number = 0
    finished: bool = False
    """The job is over: its last step is done, and saved if that was possible."""


class SwarmUnsaved(Message, frozen=True):
    """A saver could not save: another member of the stage does, as long as there is one."""

    step: Number


# ------------------------------------------------------------------------- member <-> member


class Work(msgspec.Struct, frozen=True):
    """One attempt to take a leased microbatch through all stages, the same in all its messages."""

    step: Number
    index: Number
    lease: Number
    attempt: Number
    """Counts the paths of this lease; messages of an older attempt are ignored."""
    path: list[Holder]
    """The member of each stage; `path[0]` is the driver."""
    stages: list[Number]
    """As in the lease."""

    @property
    def evaluates(self) -> bool:
        """Whether it is an evaluation: forward only, and nothing is kept of it."""
        return not self.stages

    @property
    def key(self) -> tuple[int, int, int]:
        """(step, index, lease): what inputs and pending gradients are kept under."""
        return self.step, self.index, self.lease


class Forward(msgspec.Struct, frozen=True, omit_defaults=True, tag="forward"):
    """Activations, the input of `stage`, from `path[stage - 1]` to `path[stage]`."""

    work: Work
    stage: Number
    codec: str
    shape: list[Number]
    sizes: list[Number] = []
    """Bytes of the encoded tensor's parts, which follow the head."""


class Backward(msgspec.Struct, frozen=True, omit_defaults=True, tag="backward"):
    """The gradient of the output of `stage`, from `path[stage + 1]` to `path[stage]`."""

    work: Work
    stage: Number
    codec: str
    shape: list[Number]
    sizes: list[Number] = []


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """From the driver to `path[stage]`: compute the kept input again and send the output on."""

    work: Work
    stage: Number


class Handed(msgspec.Struct, frozen=True, omit_defaults=True, tag="handed"):
    """To the driver: `path[stage]` has computed, and the next member has what it sent.

    The last stage reports once, after its backward pass; the first of `work.stages` reports its
    backward pass as soon as the gradient is pending, and sends nothing on.
    """

    step: Number
    index: Number
    lease: Number
    attempt: Number
    stage: Number
    backward: bool
    seconds: Finite = 0.0
    """Of computing, without waiting; both passes at the last stage."""
    queue: Number = 0
    """Microbatches waiting at the member."""
    held_out: HeldOutSum | None = None
    """Of an evaluation, from the last stage."""


class Broken(msgspec.Struct, frozen=True, omit_defaults=True, tag="broken"):
    """To the driver: `path[stage]` failed."""

    step: Number
    index: Number
    lease: Number
    attempt: Number
    stage: Number
    """Stage of the member that failed; not necessarily the sender's."""
    reason: str = ""
    busy: bool = False
    """It only had no room or no such input: bypass it, without a ban."""


class Copy(msgspec.Struct, frozen=True, tag="copy"):
    """To another member of the stage: the sum of this step so far, against a loss of the sender.

    The data are the mean of the gradients as float32, as in a round.
    """

    of: Holder
    """The sender."""
    step: Number
    shares: list[Share]
    rows: Number
    loss: float


class Release(msgspec.Struct, frozen=True, omit_defaults=True, tag="release"):
    """From the driver: the microbatch has passed all stages, its kept inputs are no longer needed.

    Pending gradients stay until the ledger's shares decide, or the step is over.
    """

    step: Number
    index: Number
    lease: Number
    drop: bool = False
    """It will never count: drop the pending gradients, too."""


SwarmHead = Forward | Backward | Resume | Handed | Broken | Copy | Release
_heads = msgspec.msgpack.Decoder(SwarmHead)


def pack_head(head: SwarmHead) -> bytes:
    """Return the encoded head of a message between members."""
    return msgspec.msgpack.encode(head)


def unpack_head(data: bytes) -> SwarmHead:
    """Parse a head; raises WireError if it is malformed."""
    try:
        head: SwarmHead = _heads.decode(data)
    except MALFORMED as error:
        raise WireError("a message of a swarm is malformed", given=str(error)) from error
    return head
