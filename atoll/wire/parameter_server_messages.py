"""What members and parameter servers say to each other; the hub never looks at it.

A *serving* is one side's message: a short msgpack head and one packet of raw bytes behind it. Asks
go from a member to a server, answers come back; each ask has exactly one answer, sometimes a late
one.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError
from atoll.wire.malformed import MALFORMED


class Setup(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a server works; every server of a job has the same one but for `parameters`."""

    rule: str = "sgd"
    """What an arrival does to the vector; see `atoll.reducer.update_rules`."""
    rate: float = 1.0
    """Rate of the rule; multiplied by the rate that comes with a push."""
    momentum: float = 0.0
    buffer: int = 1
    """Arrivals per step of the momentum (delayed Nesterov)."""
    activation: float = 0.0
    """How much of the momentum every arrival moves already (delayed Nesterov)."""
    mode: str = "asynchronous"
    """`asynchronous`, `stale` or `synchronous`."""
    bound: int = 0
    """Clocks that a member may be ahead of the slowest one (stale)."""
    backups: int = 0
    """Members that a clock does not wait for (synchronous)."""
    staleness: str = "constant"
    """What a late push counts: `constant`, `inverse` or `power`."""
    power: float = 0.5
    limit: int = 0
    """Staleness above which a push is refused; 0: none is."""
    compensation: float = 0.0
    """Strength of delay compensation; 0: none."""
    every: int = 1
    """Optimizer steps between two pushes of the fastest member."""
    dynamic: bool = False
    """Whether slower members push after fewer steps."""
    parameters: int = 0
    """Leading elements that the rule moves; the others are buffers, which are averaged."""
    reply: str = "fp32"
    """Codec of the vector in answers."""


class Attach(msgspec.Struct, frozen=True, omit_defaults=True, tag="attach"):
    """Ask to take part from an anchor on; answered when a server stands on it."""

    anchor: int
    """Epoch of the committed round whose state the member holds."""
    members: list[str] = []
    """Who took part in that round; empty for who came later."""
    want: bool = True
    """Whether the answer should bring the vector."""


class Load(msgspec.Struct, frozen=True, omit_defaults=True, tag="load"):
    """Ask to stand on an anchor: the packet has the vector, then those of the rule, in fp32."""

    anchor: int
    members: list[str]
    setup: Setup
    elements: int
    """Of the vector."""
    vectors: list[str] = []
    """Names of the rule's vectors, each of `setup.parameters` elements."""
    scalars: dict[str, float] = {}
    version: int = 0
    progress: float = 0.0


class Push(msgspec.Struct, frozen=True, omit_defaults=True, tag="push"):
    """Ask to apply what a member has learned; answered with the new vector."""

    anchor: int
    seq: int
    """Grows with every push of the member: the same number again changes nothing."""
    version: int
    """Version of the vector that the member computed on."""
    codec: str
    sizes: list[int]
    steps: int = 1
    busy_s: float = 0.0
    """Seconds that the steps took."""
    weight: float = 1.0
    rate: float = 1.0


class Fetch(msgspec.Struct, frozen=True, omit_defaults=True, tag="fetch"):
    """Ask for everything that a server holds, to make it an anchor."""

    anchor: int


class Idle(msgspec.Struct, frozen=True, omit_defaults=True, tag="rest"):
    """Tell that no push follows before the next anchor: nobody is to wait for one."""

    anchor: int
    final: bool = False
    """The member has done all its steps."""


Ask = Attach | Load | Push | Fetch | Idle


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a server says to an ask."""

    kind: str
    """`theta` (here is the vector), `load` (load me), `unknown` (the anchor is another one),
    `state` (everything), `rested`, or `refused`."""
    anchor: int = -1
    version: int = 0
    clock: int = 0
    """Clocks that the member has finished from now on."""
    progress: float = 0.0
    """Steps of the schedule that all members together have come."""
    steps: int = 1
    """Optimizer steps until the member's next push."""
    length: int = 1
    """Steps of the schedule that will have passed by then."""
    accepted: bool = True
    """Whether the push was applied."""
    staleness: int = 0
    hurry: bool = False
    """Others hold an anchor already."""
    codec: str = ""
    sizes: list[int] = []
    vectors: list[str] = []
    scalars: dict[str, float] = {}
    error: dict[str, str] = {}


_ask_decoder = msgspec.msgpack.Decoder(Ask)
_answer_decoder = msgspec.msgpack.Decoder(Answer)


def pack_message(message: Ask | Answer) -> bytes:
    """Return the encoded head of a serving."""
    return msgspec.msgpack.encode(message)


def unpack_ask(data: bytes) -> Ask:
    """Return a member's ask.

    Raises:
        WireError: it is malformed.
    """
    try:
        ask: Ask = _ask_decoder.decode(data)
    except MALFORMED as error:
        raise WireError("an ask of a member is malformed", given=str(error)) from error
    return ask


def unpack_answer(data: bytes) -> Answer:
    """Return a server's answer.

    Raises:
        WireError: it is malformed.
    """
    try:
        return _answer_decoder.decode(data)
    except MALFORMED as error:
        raise WireError("an answer of a server is malformed", given=str(error)) from error
