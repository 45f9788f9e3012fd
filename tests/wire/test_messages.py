from __future__ import annotations

import contextlib
import math
import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import FrameTooLarge, WireError
from atoll.wire import messages
from atoll.wire.frames import Kind, decode, encode
from atoll.wire.limits import MAX_CONTROL_BYTES
from atoll.wire.message import Finite, Number, WallTime
from atoll.wire.messages import (
    Beat,
    Commitment,
    Done,
    Envelope,
    Finished,
    Launch,
    Lease,
    LogLines,
    Message,
    Metrics,
    Point,
    QueueAckMany,
    QueueExtendMany,
    QueueItem,
    QueueItems,
    Register,
    RoundJoin,
    RoundPlan,
    RoundVote,
    Stop,
    VerificationAnswer,
    pack,
    pack_command,
    unpack,
    unpack_command,
)
from atoll.wire.round_messages import BytesPerSecond, TripSeconds

BODIES: list[type[Message]] = list(
    typing.get_args(typing.get_type_hints(Envelope)["body"])
)  # every message that may be in an envelope

EXAMPLES: list[Message] = [
    Finished(True, result={"loss": [1, 2.5, None, "x", {"deep": b"bytes"}]}),
    Metrics("inc", 1, [Point(1.0, 2, 3, {"loss": 4.0})]),
    RoundPlan("job", 1, 2, ["w0", "w1"], "relay", reducer="job/reducer"),
    QueueItems([QueueItem(1, "key", b"payload", 1, "lease")]),
    LogLines("job", "w0", 1, ["grüße", ""]),
]

texts = st.text(max_size=20)
values: dict[object, st.SearchStrategy[typing.Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    Finite: st.floats(-1e300, 1e300),
    float: st.floats(allow_nan=False),
    Number: st.integers(-(2**62), 2**62),
    WallTime: st.floats(-1e12, 1e12),
    TripSeconds: st.floats(0.0, 1e6),
    BytesPerSecond: st.floats(0.0, 1e15, exclude_min=True),
    typing.Any: st.recursive(
        st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
}


def bodies() -> st.SearchStrategy[Message]:
    return st.sampled_from(BODIES).flatmap(build)


def build(kind: type[Message]) -> st.SearchStrategy[Message]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: strategy_for(hint) for name, hint in hints.items()})


def strategy_for(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    if hint in values:
        return values[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return strategy_for(arguments[0])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(strategy_for(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(strategy_for(argument) for argument in arguments))
    if origin is dict:
        return st.dictionaries(strategy_for(arguments[0]), strategy_for(arguments[1]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(strategy_for, arguments))
    if origin is not None or type(None) in arguments:
        return st.one_of(*(strategy_for(argument) for argument in arguments))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return build(typing.cast("type[Message]", hint))
    if hint is str:
        return texts
    if hint is bytes:
        return st.binary(max_size=20)
    return st.from_type(hint)


@given(bodies(), st.integers(0, 2**60), st.booleans())
def test_every_message_comes_back_as_it_was_sent(body: Message, id: int, reply: bool) -> None:
    envelope = unpack(decode(pack(body, id=id, reply=reply)))
    assert (envelope.id, envelope.reply, envelope.body) == (id, reply, body)


def test_every_kind_of_message_is_in_the_envelope() -> None:
    parts = (messages.NodeInfo, messages.Offer, messages.Point, messages.Peer, messages.MemberStats)
    inner = set(parts)  # of others
    known = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Message) and kind is not Message
    }
    assert known - set(BODIES) <= inner


@given(st.binary(max_size=300))
def test_garbage_in_a_control_frame_is_refused_with_a_wire_error(body: bytes) -> None:
    with pytest.raises(WireError):
        unpack(decode(encode(Kind.CONTROL, body)))


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_message_is_refused_or_still_a_message(
    body: Message, data: st.DataObject
) -> None:
    encoded = bytearray(msgspec.msgpack.encode([1, False, body]))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(encoded) - 1))
        encoded[position] = data.draw(st.integers(0, 255))
    try:
        envelope = unpack(decode(encode(Kind.CONTROL, encoded)))
    except WireError:
        return
    assert isinstance(envelope.body, Message)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_cut_short_is_refused(body: Message, data: st.DataObject) -> None:
    encoded = msgspec.msgpack.encode([1, False, body])
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(WireError):
        unpack(decode(encode(Kind.CONTROL, encoded[:cut])))


@pytest.mark.parametrize(
    "inside",
    [
        b"\x91" * 100_000,  # nested beyond any stack
        b"\xa1\xff",  # not UTF-8
        b"\x81\x91\x01\x02",  # a list as a key
        b"\xd6\xff\xff\xff\xff\xff",  # a time
        b"\xc7\x0c\xff" + b"\xff" * 12,  # a time out of range
        b"\xdd\xff\xff\xff\xff",  # four billion items that are not there
        b"\xc6\xff\xff\xff\xff",  # four gigabytes that are not there
    ],
)
def test_hostile_values_raise_only_wire_errors(inside: bytes) -> None:
    whole = msgspec.msgpack.encode([1, False, Finished(True, result={"a": 7})])
    body = whole[: whole.rindex(b"\xa1a\x07") + 2] + inside
    with contextlib.suppress(WireError):
        unpack(decode(encode(Kind.CONTROL, body)))


def test_an_unknown_message_is_named() -> None:
    body = msgspec.msgpack.encode([1, False, {"type": "Frobnicate"}])
    with pytest.raises(WireError, match="Frobnicate"):
        unpack(decode(encode(Kind.CONTROL, body)))


def test_a_message_with_an_object_in_it_is_refused_by_the_sender() -> None:
    with pytest.raises(WireError, match="Finished cannot be sent"):
        pack(Finished(True, result={"a": object()}))
    with pytest.raises(WireError, match="LogLines cannot be sent"):
        pack(LogLines("job", "w0", 1, ["\ud800"]))


def test_a_message_over_the_limit_is_refused_by_the_sender() -> None:
    with pytest.raises(FrameTooLarge, match="control frame"):
        pack(LogLines("job", "w0", 1, ["x" * MAX_CONTROL_BYTES]))


def test_empty_messages_are_small() -> None:
    assert len(pack(Done(), id=1, reply=True)) < 40


@pytest.mark.parametrize(
    "command", [Launch("j", "w0", 0, "t", "spec", {"a.py": "x"}), Stop("j", "w0")]
)
def test_commands_come_back_as_they_were_queued(command: Launch | Stop) -> None:
    assert unpack_command(pack_command(command)) == command


@given(st.binary(max_size=200))
def test_a_payload_that_is_no_command_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="command"):
        unpack_command(payload)


@pytest.mark.parametrize(
    "body",
    [
        LogLines("j", "w0", 1, [""] * 100_000),
        LogLines("j", "m" * 100_000, 1, [""]),
        Metrics("i", 1, [Point(0.0, 1, 0, {})] * 10_000),
        Metrics("i" * 1_000, 1, []),
        QueueAckMany("j/q", ["1.x"] * 10_000),
        QueueExtendMany("j/q", ["1.x"] * 10_000, 1.0),
        Beat(stats={str(number): 0.0 for number in range(10_000)}),
        RoundVote(0, 1, True, "d" * 10_000),
        RoundVote(0, 1, True, lease=Lease(0, {"offset" * 100: 1})),
        RoundJoin(0, "base", lease=Lease(0, {str(number): 1 for number in range(1_000)})),
        RoundJoin(0, "base", lines={str(number): (0.1, 1e6) for number in range(65)}),
        RoundJoin(0, "base", lines={"w" * 300: (0.1, 1e6)}),
        RoundJoin(0, "base", reachable=["w1"] * 100_000),
        VerificationAnswer(1, "detail", failed="x" * 100_000),
        VerificationAnswer(1, "detail", digests=["d" * 100_000]),
        VerificationAnswer(1, "detail", digests=["d"] * 200_000),
        RoundJoin(0, "base", commitment=Commitment(0, 1, 1, 0, marks=["d"] * 1_000)),
        RoundJoin(0, "base", commitment=Commitment(0, 1, 1, 0, arithmetic="a" * 10_000)),
        RoundJoin(0, "base", commitment=Commitment(0, 1, 1, 0, cursor={"c" * 300: 1})),
        Register(dial=["h:1"] * 1_000),
        Register(state=["h" * 10_000]),
        Register(identity="i" * 10_000),
    ],
    ids=lambda body: type(body).__name__,
)
def test_one_message_is_not_the_work_of_a_thousand(body: Message) -> None:
    """A hub handles a message in one transaction, and the votes of others wait for it."""
    with pytest.raises(WireError, match=r"(?i)length"):
        unpack(decode(pack(body, id=1)))


@pytest.mark.parametrize(
    "line", [(math.nan, 1e6), (-0.1, 1e6), (math.inf, 1e6), (0.1, 0.0), (0.1, math.nan),
             (0.1, math.inf), (0.1, -1.0)],
)  # fmt: skip
def test_measured_lines_are_finite_and_possible(line: tuple[float, float]) -> None:
    with pytest.raises(WireError, match="lines"):
        unpack(decode(pack(RoundJoin(0, "base", lines={"w1": line}), id=1)))
    usable = RoundJoin(0, "base", lines={"w1": (0.0, 1.0)})
    assert unpack(decode(pack(usable, id=1))).body == usable


MAY_BE_ANYTHING = {
    ("Point", "values"),  # a loss may be NaN, and is drawn as a gap
    ("MemberStats", "phases"), ("MemberStats", "update_norm"), ("MemberStats", "loss"),
    ("MemberStats", "sent_bytes"),  # checked by `validate_stats`, which names what is odd
    ("HeldOutSum", "loss_sum"),  # checked by `hub/swarm/held_out.py`
}  # fmt: skip


def plain_numbers(hint: typing.Any) -> bool:
    """Whether a type has numbers without a bound."""
    if typing.get_origin(hint) is typing.Annotated and hint.__origin__ in (int, float):
        return False
    return hint in (int, float) or any(plain_numbers(one) for one in typing.get_args(hint))


def test_every_number_in_a_message_has_bounds() -> None:
    """One infinite number in what a hub keeps is `null` in JSON, and it does not start again."""
    found = set()
    structs = list(BODIES)
    for kind in structs:
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            if plain_numbers(hint):
                found.add((kind.__name__, name))
            structs += [one for one in _structs(hint) if one not in structs]
    assert found == MAY_BE_ANYTHING


def _structs(hint: typing.Any) -> list[type[Message]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return [typing.cast("type[Message]", hint)]
    return [one for part in typing.get_args(hint) for one in _structs(part)]
