"""Every control message of the protocol, and the envelope that carries it.

A control frame carries one `Envelope`: a request has `id > 0` and `reply=False`, its answer the
same id and `reply=True`; a notice has `id == 0` and no answer. After a reconnect requests are sent
again with the same content: every handler MUST be idempotent.
"""

from __future__ import annotations

import msgspec

from atoll.errors import WireError
from atoll.wire.frames import Frame, Kind, encode
from atoll.wire.job_messages import (
    Acked,
    Event,
    Finished,
    Launch,
    LogLines,
    Metrics,
    Point,
    ProcessState,
    RendezvousAddress,
    Stop,
)
from atoll.wire.malformed import MALFORMED
from atoll.wire.member_messages import (
    Drain,
    Lease,
    Leaving,
    Recover,
    Register,
    Registered,
    Source,
    Sources,
    Standing,
    Stopping,
)
from atoll.wire.message import Message
from atoll.wire.paths import PathAsk, PathMeeting, PathTrained, PathTurn
from atoll.wire.queue_messages import (
    QueueAck,
    QueueAckMany,
    QueueClaim,
    QueueEntry,
    QueueExtend,
    QueueExtendMany,
    QueueItem,
    QueueItems,
    QueueLost,
    QueueOpen,
    QueueOptions,
    QueuePut,
    QueuePutDone,
    QueuePutMany,
    QueuePutManyDone,
    QueueRelease,
    TopicAck,
    TopicItem,
    TopicItems,
    TopicPublish,
    TopicRead,
)
from atoll.wire.round_messages import (
    CheckpointPart,
    CheckpointState,
    Commitment,
    Look,
    MemberLost,
    MemberStats,
    Peer,
    Received,
    Roster,
    RosterReply,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Verdict,
    VerificationAnswer,
    VerificationAsk,
    VerificationTask,
    VerificationWork,
)
from atoll.wire.session_messages import (
    Beat,
    Credit,
    Done,
    Failure,
    Hello,
    NodeInfo,
    Offer,
    Offering,
    Undeliverable,
    Welcome,
)
from atoll.wire.swarm import (
    SwarmAnnounce,
    SwarmDone,
    SwarmKeeps,
    SwarmKept,
    SwarmLeases,
    SwarmNews,
    SwarmPlace,
    SwarmUnsaved,
    SwarmWant,
    SwarmWatch,
)

__all__ = [
    "Acked",
    "Beat",
    "Body",
    "CheckpointPart",
    "CheckpointState",
    "Command",
    "Commitment",
    "Credit",
    "Done",
    "Drain",
    "Envelope",
    "Event",
    "Failure",
    "Finished",
    "Hello",
    "Launch",
    "Lease",
    "Leaving",
    "LogLines",
    "Look",
    "MemberLost",
    "MemberStats",
    "Message",
    "Metrics",
    "NodeInfo",
    "Offer",
    "Offering",
    "PathAsk",
    "PathMeeting",
    "PathTrained",
    "PathTurn",
    "Peer",
    "Point",
    "ProcessState",
    "QueueAck",
    "QueueAckMany",
    "QueueClaim",
    "QueueEntry",
    "QueueExtend",
    "QueueExtendMany",
    "QueueItem",
    "QueueItems",
    "QueueLost",
    "QueueOpen",
    "QueueOptions",
    "QueuePut",
    "QueuePutDone",
    "QueuePutMany",
    "QueuePutManyDone",
    "QueueRelease",
    "Received",
    "Recover",
    "Register",
    "Registered",
    "RendezvousAddress",
    "Roster",
    "RosterReply",
    "RoundJoin",
    "RoundPlan",
    "RoundVote",
    "Source",
    "Sources",
    "Standing",
    "Stop",
    "Stopping",
    "SwarmAnnounce",
    "SwarmDone",
    "SwarmKeeps",
    "SwarmKept",
    "SwarmLeases",
    "SwarmNews",
    "SwarmPlace",
    "SwarmUnsaved",
    "SwarmWant",
    "SwarmWatch",
    "TopicAck",
    "TopicItem",
    "TopicItems",
    "TopicPublish",
    "TopicRead",
    "Undeliverable",
    "Verdict",
    "VerificationAnswer",
    "VerificationAsk",
    "VerificationTask",
    "VerificationWork",
    "Welcome",
    "pack",
    "pack_command",
    "unpack",
    "unpack_command",
]


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Contents of one control frame."""

    id: int
    reply: bool
    body: (
        Hello | Welcome | Failure | Done | Beat | Credit | Undeliverable
        | QueuePut | QueuePutDone | QueueClaim | QueueItem | QueueItems | QueueAck | QueueExtend
        | QueueRelease | Launch | Stop | ProcessState | LogLines | Acked | Metrics | Event
        | Finished | Register | Registered | Roster | RosterReply | RoundJoin | RoundPlan
        | RoundVote | Verdict | MemberLost | CheckpointPart | CheckpointState
        | Lease | Recover | Source | Sources | Standing | Leaving | Drain | Offering
        | QueueOpen | QueuePutMany | QueuePutManyDone | QueueAckMany | QueueExtendMany | QueueLost
        | TopicPublish | TopicRead | TopicItems | TopicAck | Stopping
        | SwarmAnnounce | SwarmPlace | SwarmWant | SwarmLeases | SwarmDone | SwarmKept | SwarmKeeps
        | SwarmWatch | SwarmNews | SwarmUnsaved | PathAsk | PathTurn | PathTrained | PathMeeting
        | Received | VerificationAsk | VerificationWork | VerificationAnswer
    )  # fmt: skip


Body = Message
Command = Launch | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)
_commands: msgspec.msgpack.Decoder[Launch | Stop] = msgspec.msgpack.Decoder(Launch | Stop)


def pack(body: Message, *, id: int = 0, reply: bool = False) -> bytes:
    """Return the control frame of a message.

    Raises:
        WireError: a field holds a value that msgpack cannot carry, e.g. in `Finished.result`.
        FrameTooLarge: it exceeds the limit of control frames.
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
    """Return the envelope in a control frame; raises WireError naming the malformed field."""
    try:
        return _decoder.decode(frame.body)
    except MALFORMED as error:
        raise WireError("a control message is malformed", given=str(error)) from error


def pack_command(command: Command) -> bytes:
    """Return the queue payload of a command to a node."""
    return _encoder.encode(command)


def unpack_command(payload: bytes) -> Command:
    """Parse a queue payload; raises WireError if it is not a command."""
    try:
        return _commands.decode(payload)
    except MALFORMED as error:
        raise WireError("a command is malformed", given=str(error)) from error
