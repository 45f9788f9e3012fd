"""Messages between members and parameter servers; opaque to the hub.

Each message is a short msgpack head and one packet of raw bytes. A member sends asks, the server
answers each exactly once, possibly late.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError
from atoll.wire.malformed import MALFORMED

MOST_REGIONS = 64
"""Most regions of one server: it holds several vectors for each."""


class Setup(msgspec.Struct, frozen=True, omit_defaults=True):
    """Configuration of a server, equal on all servers of a job except for `parameters`."""

    rule: str = "sgd"
    """Update rule applied to each push; see `atoll.reducer.update_rules`."""
    rate: float = 1.0
    """Learning rate of the rule, multiplied by the rate in each push."""
    momentum: float = 0.0
    buffer: int = 1
    """Pushes per momentum step (delayed Nesterov)."""
    activation: float = 0.0
    """Share of the momentum applied with every push (delayed Nesterov)."""
    mode: str = "asynchronous"
    """`asynchronous`, `stale` or `synchronous`."""
    bound: int = 0
    """Clocks that a member may be ahead of the slowest (stale)."""
    backups: int = 0
    """Members that a clock does not wait for (synchronous)."""
    staleness: str = "constant"
    """Weight of a late push: `constant`, `inverse` or `power`."""
    power: float = 0.5
    limit: int = 0
    """Staleness above which a push is refused; 0: unlimited."""
    compensation: float = 0.0
    """Strength of delay compensation; 0: none."""
    look_ahead: float = 0.0
    """Share of the momentum's predicted move until the next push that answers add; 0: none."""
    regions: list[int] = []
    """Number of members of each region. A region has its own model, which `rule` merges into the
    vector; empty: one model for all."""
    merge_every: int = 1
    """Pushes of a region's members between two merges (K)."""
    mix: float = 1.0
    """Step of a region's model towards the global one in a merge (alpha); 1: all the way."""
    region_rule: str = "sgd"
    """Update rule of a region's model, with the two numbers below."""
    region_rate: float = 1.0
    region_momentum: float = 0.0
    every: int = 1
    """Optimizer steps between two pushes of the fastest member."""
    dynamic: bool = False
    """Whether slower members push after fewer steps."""
    parameters: int = 0
    """Leading elements updated by the rule; the rest are buffers, which are averaged."""
    reply: str = "fp32"
    """Codec of the vector in answers."""


def region_of(slot: int, *, members: int, regions: int) -> int:
    """Return the region of a member by its place among all: neighbours are in one region."""
    return slot * regions // members


class Attach(msgspec.Struct, frozen=True, omit_defaults=True, tag="attach"):
    """Ask to train from an anchor on; answered once a server has loaded that anchor."""

    anchor: int
    """Epoch of the committed round that the member holds."""
    members: list[str] = []
    """Members of that round; empty from a member that joined later."""
    want: bool = True
    """Whether the answer should contain the vector."""


class Load(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    """Ask to load an anchor; the packet holds the vector and the rule's vectors, in fp32."""

    anchor: int
    members: list[str]
    setup: Setup
    elements: int
    vectors: list[str] = []
    """Names of the rule's vectors, each of `setup.parameters` elements."""
    scalars: dict[str, float] = {}
    version: int = 0
    progress: float = 0.0


class Push(msgspec.Struct, frozen=True, omit_defaults=True, tag="push"):
    """Ask to apply a member's update; answered with the new vector."""

    anchor: int
    seq: int
    """Increases with every push of the member; a repeated number is ignored."""
    version: int
    """Version of the vector that the update was computed from."""
    codec: str
    sizes: list[int]
    steps: int = 1
    busy_s: float = 0.0
    """Compute seconds of the steps."""
    weight: float = 1.0
    rate: float = 1.0


class Fetch(msgspec.Struct, frozen=True, omit_defaults=True, tag="fetch"):
    """Ask for the server's whole state, to make it an anchor."""

    anchor: int


class Idle(msgspec.Struct, frozen=True, omit_defaults=True, tag="idle"):
    """Notice that no push follows before the next anchor: clocks stop waiting for this member."""

    anchor: int
    final: bool = False


Ask = Attach | Load | Push | Fetch | Idle


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's answer to an ask."""

    kind: str
    """`theta` (the vector), `load` (send a `Load`), `unknown` (another anchor), `state` (all of
    it), `idle`, or `refused`."""
    anchor: int = -1
    version: int = 0
    clock: int = 0
    """Clocks that the member has completed."""
    progress: float = 0.0
    """Steps of the schedule completed by all members together."""
    steps: int = 1
    """Optimizer steps until the member's next push."""
    length: int = 1
    """Steps of the schedule that will have passed by then."""
    accepted: bool = True
    staleness: int = 0
    hurry: bool = False
    """Other members already wait at a sync point."""
    codec: str = ""
    sizes: list[int] = []
    vectors: list[str] = []
    scalars: dict[str, float] = {}
    error: dict[str, str] = {}


_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def pack_message(message: Ask | Answer) -> bytes:
    """Return the encoded head."""
    return msgspec.msgpack.encode(message)


def unpack_ask(data: bytes) -> Ask:
    """Parse a member's ask; raises WireError if it is malformed."""
    try:
        ask: Ask = _ask_decoder.decode(data)
    except MALFORMED as error:
        raise WireError("an ask of a member is malformed", given=str(error)) from error
    return ask


def unpack_answer(data: bytes) -> Answer:
    """Parse a server's answer; raises WireError if it is malformed."""
    try:
        return _answer_decoder.decode(data)
    except MALFORMED as error:
        raise WireError("an answer of a server is malformed", given=str(error)) from error
