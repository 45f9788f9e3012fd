"""Messages of a SWARM: between members and the hub's ledger, and between members.

A job of `stages` stages trains on microbatches (step, index). A member of the first stage, the
*driver*, leases a microbatch from the ledger, chooses a *path* (one member per stage), and sends
its activations along the path and the gradients back. See `docs/decisions/0009`.

The requests to the hub may be repeated at any time: `epoch` names the member's present standing,
and each request says what the member already has.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError
from atoll.wire.malformed import MALFORMED
from atoll.wire.message import Message


class Holder(msgspec.Struct, frozen=True, array_like=True, order=True):
    """A member since it last announced itself: what it held under an older epoch is lost."""

    member: str
    epoch: int


class SwarmPeer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member that serves a stage."""

    member: str
    epoch: int
    stage: int
    dial: list[str] = []
    """host:port at which it accepts activations; empty: only through the hub."""
    row_s: float = 0.0
    """Seconds of one row's forward pass, as the member measured; 0: unknown."""

    @property
    def holder(self) -> Holder:
        """Member and epoch."""
        return Holder(self.member, self.epoch)


class SwarmLease(msgspec.Struct, frozen=True, omit_defaults=True):
    """A microbatch for one driver to take through all stages."""

    step: int
    index: int
    lease: int
    """Number of this lease, unique in the job; pending gradients are kept under it."""
    stages: list[int] = []
    """Ascending: stages that keep a pending gradient. The way back ends at the first of them."""


class Share(msgspec.Struct, frozen=True, array_like=True):
    """A microbatch of the present step, as counted for one stage."""

    index: int
    lease: int
    member: str = ""
    """Its holder folds the pending gradient of this lease. All others drop what they hold of
    `index` under this lease and older ones: a younger lease may still come to count."""


# ------------------------------------------------------------------------ member <-> ledger


class SwarmAnnounce(Message, frozen=True):
    """A member is ready, asks for a place, or returns after a lost connection."""

    epoch: int = 0
    """From its last `SwarmPlace`; 0: a new process, or one that has dropped everything."""
    stage: int = -1
    """Stage that its state belongs to; -1: it has no state."""
    step: int = -1
    """Steps that its state contains; the next step it computes."""
    folded: list[Share] = []
    """What its sum of this step holds."""
    agreed: bool = False
    """It can apply this step: it holds the mean on which its stage agreed or, without a round in
    every step, knows all shares of its stage."""
    restored: bool = False
    """Its state comes from the checkpoint that the place named, of whatever step."""
    dial: list[str] = []
    row_s: float = 0.0
    """Seconds of one row's forward pass; 0: not measured."""
    free_bytes: int = 0
    """Memory free for parameters, optimizer state and activations; 0: unknown."""


class SwarmPlace(Message, frozen=True):
    """Answer to `SwarmAnnounce`."""

    epoch: int
    stage: int
    """Stage to serve; -1: it fits none, announce again later."""
    step: int
    """Present step of the job."""
    ready: bool = False
    """The member is in the table: microbatches of `step` may come. Otherwise it recovers the
    stage's state, then announces itself again."""
    keep: bool = False
    """`folded` stands. Otherwise the sum of this step and all pending gradients are dropped."""
    donors: list[str] = []
    """Members of the stage that hold its state; empty: recover from the checkpoint."""


class SwarmWant(Message, frozen=True):
    """A driver asks for microbatches; answered when there is one, or after some seconds."""

    epoch: int
    room: int
    """Microbatches that it can take besides those it holds."""
    holding: list[int] = []
    """Leases that it works on; others leased to it are given again."""


class SwarmLeases(Message, frozen=True):
    """Answer to `SwarmWant`."""

    leases: list[SwarmLease]


class SwarmDone(Message, frozen=True):
    """A microbatch is through; answered by `Done` whether or not it counts."""

    step: int
    index: int
    lease: int
    stages: list[int] = []
    holders: list[Holder] = []
    """For each of `stages`, the member with the pending gradient."""
    queues: dict[str, float] = {}
    """Microbatches waiting at members, as they reported last."""
    row_s: dict[str, float] = {}
    """Seconds of one row's forward pass at members, as the driver measured."""


class SwarmWatch(Message, frozen=True):
    """A member asks for news; answered when there are any, or after some seconds."""

    epoch: int
    step: int
    """The member's step."""
    shares: int = 0
    """Shares of this step that it knows, counted from 0 again after every `SwarmPlace`; what is
    already in its sum then comes again and is ignored."""
    closing: int = 0
    """The closing that it knows."""
    table: int = 0
    """Version of the table that it knows."""


class SwarmNews(Message, frozen=True):
    """Answer to `SwarmWatch`."""

    step: int
    """Present step; later than the member's: apply the step that it knows to be closed."""
    shares: list[Share] = []
    """Of the asking member's stage and step, after those it knows."""
    closing: int = 0
    """Above 0: the shares of this stage are complete, and its members meet in the step's round,
    with this number in `RoundJoin.closing`. 0: open, again if a holder was lost. From its join to
    the verdict a member folds nothing."""
    table: int = 0
    peers: list[SwarmPeer] = []
    """All members that serve a stage, if `table` is newer than the one known."""
    dropped: bool = False
    """The epoch is not the member's present one: it was lost, fell behind, or moves to another
    stage. It announces itself again; the place says what to keep."""
    paused: str = ""
    """Why the job waits, e.g. for a member of a stage; empty: it runs."""


# ------------------------------------------------------------------------- member <-> member


class Work(msgspec.Struct, frozen=True):
    """One attempt to take a leased microbatch through all stages, the same in all its messages."""

    step: int
    index: int
    lease: int
    attempt: int
    """Counts the paths of this lease; messages of an older attempt are ignored."""
    path: list[Holder]
    """The member of each stage; `path[0]` is the driver."""
    stages: list[int]
    """As in the lease."""

    @property
    def key(self) -> tuple[int, int, int]:
        """(step, index, lease): what inputs and pending gradients are kept under."""
        return self.step, self.index, self.lease


class Forward(msgspec.Struct, frozen=True, omit_defaults=True, tag="forward"):
    """Activations, the input of `stage`, from `path[stage - 1]` to `path[stage]`."""

    work: Work
    stage: int
    codec: str
    shape: list[int]
    sizes: list[int] = []
    """Bytes of the encoded tensor's parts, which follow the head."""


class Backward(msgspec.Struct, frozen=True, omit_defaults=True, tag="backward"):
    """The gradient of the output of `stage`, from `path[stage + 1]` to `path[stage]`."""

    work: Work
    stage: int
    codec: str
    shape: list[int]
    sizes: list[int] = []


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """From the driver to `path[stage]`: compute the kept input again and send the output on."""

    work: Work
    stage: int


class Handed(msgspec.Struct, frozen=True, omit_defaults=True, tag="handed"):
    """To the driver: `path[stage]` has computed, and the next member has what it sent.

    The last stage reports once, after its backward pass; the first of `work.stages` reports its
    backward pass as soon as the gradient is pending, and sends nothing on.
    """

    step: int
    index: int
    lease: int
    attempt: int
    stage: int
    backward: bool
    seconds: float = 0.0
    """Of computing, without waiting; both passes at the last stage."""
    queue: int = 0
    """Microbatches waiting at the member."""


class Broken(msgspec.Struct, frozen=True, omit_defaults=True, tag="broken"):
    """To the driver: `path[stage]` did not do its part."""

    step: int
    index: int
    lease: int
    attempt: int
    stage: int
    """The stage whose member failed, which may be another one than the sender's."""
    reason: str = ""
    busy: bool = False
    """It only had no room or no such input: bypass it, without a ban."""


class Release(msgspec.Struct, frozen=True, omit_defaults=True, tag="release"):
    """From the driver: the microbatch is through, its kept inputs are not needed any more.

    Pending gradients stay until the ledger's shares decide on them, or the step is over.
    """

    step: int
    index: int
    lease: int
    drop: bool = False
    """It will never count: drop the pending gradients, too."""


SwarmHead = Forward | Backward | Resume | Handed | Broken | Release

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
