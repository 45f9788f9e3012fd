"""Packets of an all-to-all: what one member sends to the others, and what it receives.

On the relay a member sends one packet: the length of a table, the table (recipients and encoding of
each message), then the messages' bytes. The reducer sends every member one packet of the same form
with the messages addressed to it, their senders, all weights, and a digest over everything that was
sent, equal for all. On direct routes members send such tables to each other.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from atoll.codec.base import Packet
from atoll.digest import Digest
from atoll.errors import GroupError, WireError
from atoll.reducer.mean import is_weight, result_digest
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

MAX_TABLE_BYTES = 64 * 2**20

_LENGTH = struct.Struct("!I")

ALIGNMENT = 16
"""Byte alignment of every message, so that its values can be read in place."""


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """One packet for some members."""

    to: tuple[str, ...]
    """Recipients; may include the sender. Names outside the plan are ignored."""
    packet: Packet


class Header(msgspec.Struct, frozen=True, array_like=True):
    """A table's entry for one message."""

    names: list[str]
    """Recipients; in a `Received` table: the sender."""
    codec: str
    sizes: list[int]
    nbytes: int


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """Table of the messages that one member sends."""

    headers: list[Header]


class Received(msgspec.Struct, frozen=True, array_like=True):
    """Table of the messages that one member receives."""

    headers: list[Header]
    weights: dict[str, float]
    """Of all contributors, in slot order."""
    digest: str


TableT = TypeVar("TableT", Routed, Received)

_routed_decoder = msgspec.msgpack.Decoder(Routed)
_received_decoder = msgspec.msgpack.Decoder(Received)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """The messages that one member sends."""

    member: str
    messages: tuple[PeerMessage, ...]
    weight: float
    digest: bytes
    """BLAKE2b over the whole packet."""

    @property
    def nbytes(self) -> int:
        """Bytes of the messages; a message counts once, however many recipients it has."""
        return sum(len(message.packet.data) for message in self.messages)

    @classmethod
    def of(
        cls,
        member: str,
        messages: Sequence[PeerMessage],
        *,
        weight: float,
        members: Collection[str],
    ) -> Outgoing:
        """Return a member's messages for other members of the plan.

        Raises:
            GroupError: the weight is not usable.
        """
        if not is_weight(weight):
            raise GroupError("a weight is not usable", given=f"{weight} from {member}")
        outward: list[PeerMessage] = []
        for message in messages:
            to = tuple(name for name in message.to if name in members and name != member)
            if to:
                outward.append(PeerMessage(to, message.packet))
        gift = cls(member, tuple(outward), weight, b"")
        digest = Digest()
        for part in gift.parts():
            digest.update(part)
        return cls(member, tuple(outward), weight, digest.digest())

    def parts(self) -> list[Buffer]:
        """Return the buffers of the whole packet."""
        table = _encoder.encode(Routed([_header(p.to, p.packet) for p in self.messages]))
        return _framed(table, [message.packet.data for message in self.messages])

    def packed(self) -> bytearray:
        """Return the whole packet."""
        return bytearray().join(self.parts())

    def packed_for(self, member: str) -> bytearray:
        """Return the packet for one member; empty if it receives nothing."""
        chosen = [p for p in self.messages if member in p.to]
        if not chosen:
            return bytearray()
        table = _encoder.encode(Routed([_header((member,), p.packet) for p in chosen]))
        return bytearray().join(_framed(table, [p.packet.data for p in chosen]))


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """The messages that one member receives."""

    packets: dict[str, list[Packet]]
    """Sender -> its packets, in the order sent; senders in slot order."""
    weights: dict[str, float]
    digest: str


@dataclass(frozen=True, slots=True)
class AllToAllMessages:
    """The messages of all members, as the reducer sees them."""

    outgoing: tuple[Outgoing, ...]
    """In member order."""
    digest: str

    @classmethod
    def of(cls, outgoing: Sequence[Outgoing]) -> AllToAllMessages:
        """Combine the members' messages, given in member order."""
        digest = all_to_all_digest({gift.member: gift.digest for gift in outgoing})
        return cls(tuple(outgoing), digest)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every contributor."""
        return {gift.member: gift.weight for gift in self.outgoing}

    def packets_for(self, member: str) -> dict[str, list[Packet]]:
        """Return the packets for a member, by sender."""
        found = {g.member: [p.packet for p in g.messages if member in p.to] for g in self.outgoing}
        return {sender: packets for sender, packets in found.items() if packets}

    def for_member(self, member: str) -> Bundle:
        """Return a member's packet, ready to be cut into pieces."""
        packets = self.packets_for(member)
        headers = [_header((sender,), packet) for sender in packets for packet in packets[sender]]
        table = _encoder.encode(Received(headers, self.weights, self.digest))
        data = [packet.data for sender in packets for packet in packets[sender]]
        return Bundle(_framed(table, data))


class Bundle:
    """Several buffers sent as one packet in pieces, without concatenating them."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        self._parts = [memoryview(part) for part in parts if len(part)]
        self.nbytes = sum(len(part) for part in self._parts)

    def pieces(self, *, skip: Collection[int] = ()) -> Iterator[tuple[int, Buffer]]:
        """Yield index and bytes of each piece, without those in `skip`."""
        gathered, index = bytearray(), 0
        for part in self._parts:
            position = 0
            while position < len(part):
                piece = part[position : position + CHUNK_BYTES - len(gathered)]
                position += len(piece)
                gathered += piece
                if len(gathered) == CHUNK_BYTES:
                    if index not in skip:
                        yield index, gathered
                    gathered, index = bytearray(), index + 1
        if (gathered or not self.nbytes) and index not in skip:
            yield index, gathered


def open_outgoing(
    member: str, data: Buffer, *, weight: float, members: Collection[str]
) -> Outgoing:
    """Parse the packet that a member sent; the messages are views of it.

    Raises:
        WireError: it is malformed, or names the sender itself or a member outside the plan.
    """
    table, packets = _opened(data, Routed, sender=member)
    messages: list[PeerMessage] = []
    for header, packet in zip(table.headers, packets, strict=True):
        others = {*members} - {member}
        if not header.names or not set(header.names) <= others:
            raise WireError(
                f"a message of {member} has no recipient in the plan",
                given=", ".join(header.names), expected=f"some of {', '.join(sorted(others))}",
            )  # fmt: skip
        messages.append(PeerMessage(tuple(header.names), packet))
    digest = Digest(data).digest()
    return Outgoing(member, tuple(messages), weight, digest)


def open_direct(sender: str, data: Buffer) -> list[Packet]:
    """Parse the packets sent by one member into views; raises WireError if they are malformed."""
    return _opened(data, Routed, sender=sender)[1] if len(data) else []


def open_bundle(data: Buffer, *, me: str, members: Sequence[str]) -> DeliveredMessage:
    """Parse the packet that this member received; the packets are views of it.

    Raises:
        WireError: it is malformed, or names a member outside the plan.
    """
    table, packets = _opened(data, Received, sender="the reducer")
    if list(table.weights) != [member for member in members if member in table.weights]:
        raise WireError(
            "an all-to-all has contributors outside the plan", given=str([*table.weights])
        )
    if not all(is_weight(weight) for weight in table.weights.values()):
        raise WireError("an all-to-all has weights that are not usable", given=str(table.weights))
    found: dict[str, list[Packet]] = {}
    for header, packet in zip(table.headers, packets, strict=True):
        (sender,) = header.names if len(header.names) == 1 else ("",)
        if sender not in table.weights or sender == me:
            raise WireError("a message has no sender in the plan", given=", ".join(header.names))
        found.setdefault(sender, []).append(packet)
    ordered = {member: found[member] for member in members if member in found}
    return DeliveredMessage(ordered, table.weights, table.digest)


def all_to_all_digest(digests: Mapping[str, bytes]) -> str:
    """Return the digest that members compare before they commit; `digests` are in slot order."""
    return result_digest(list(digests.values()), list(digests))


def _header(names: Sequence[str], packet: Packet) -> Header:
    return Header(list(names), packet.codec, list(packet.sizes), len(packet.data))


def _framed(table: bytes, data: Sequence[Buffer]) -> list[Buffer]:
    parts: list[Buffer] = [_LENGTH.pack(len(table)), table, _padding(_LENGTH.size + len(table))]
    for each in data:
        parts += [each, _padding(len(each))]
    return parts


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _padding(nbytes: int) -> bytes:
    return bytes(-nbytes % ALIGNMENT)


def _opened(data: Buffer, kind: type[TableT], *, sender: str) -> tuple[TableT, list[Packet]]:
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > min(MAX_TABLE_BYTES, len(view) - _LENGTH.size):
            raise WireError("the table of messages is too long", given=f"{length} bytes")
        decoder = _routed_decoder if kind is Routed else _received_decoder
        table = decoder.decode(view[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, *MALFORMED) as error:
        raise WireError(f"the messages of {sender} are malformed", given=str(error)) from error
    start = _aligned(_LENGTH.size + length)
    sizes = [_aligned(header.nbytes) for header in table.headers]
    if min(sizes, default=0) < 0 or start + sum(sizes) != len(view):
        raise WireError(
            f"the messages of {sender} do not fit their table",
            given=f"{len(view) - start} bytes", expected=f"{sum(sizes)} bytes",
        )  # fmt: skip
    packets: list[Packet] = []
    for header, size in zip(table.headers, sizes, strict=True):
        packets.append(
            Packet(view[start : start + header.nbytes], header.codec, tuple(header.sizes))
        )
        start += size
    return table, packets  # type: ignore[return-value]
