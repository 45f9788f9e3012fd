"""Packets of a swap: what one member gives to others, and what one member gets.

On the relay a member sends one packet with all it has to give: the length of a table, the table
(who gets each parcel, and how it is encoded), then the parcels' bytes. The reducer hands every
member one packet of the same form: what is addressed to it, with the senders, all weights, and a
digest over everything that was given, equal for all. Members that dial each other send such tables
as well.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from atoll.codec.base import Packet
from atoll.errors import GroupError, WireError
from atoll.reducer.mean import is_weight, result_digest
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.malformed import MALFORMED

MAX_TABLE_BYTES = 64 * 2**20
"""Longest table in front of parcels."""

_LENGTH = struct.Struct("!I")

ALIGNMENT = 16
"""Every parcel starts at a multiple of so many bytes, so that its values can be read in place."""


@dataclass(frozen=True, slots=True)
class PeerMessage:
    """One packet on its way to some members."""

    to: tuple[str, ...]
    """Who gets it, this member itself perhaps; names that are not in the plan are ignored."""
    packet: Packet


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a table says of one parcel."""

    names: list[str]
    """Who gets it; in what a member gets: who sent it."""
    codec: str
    sizes: list[int]
    nbytes: int


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """The table of what one member gives."""

    headers: list[Header]


class Received(msgspec.Struct, frozen=True, array_like=True):
    """The table of what one member gets."""

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
    """What one member gives in a swap."""

    member: str
    messages: tuple[PeerMessage, ...]
    weight: float
    digest: bytes
    """BLAKE2b over the packet with everything."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parcels, each counted once, to however many members it goes."""
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
        """Return what a member gives to other members of a plan; what is for nobody stays out.

        Raises:
            GroupError: the weight cannot be used.
        """
        if not is_weight(weight):
            raise GroupError("a weight is not usable", given=f"{weight} from {member}")
        outward: list[PeerMessage] = []
        for message in messages:
            to = tuple(name for name in message.to if name in members and name != member)
            if to:
                outward.append(PeerMessage(to, message.packet))
        gift = cls(member, tuple(outward), weight, b"")
        digest = hashlib.blake2b(digest_size=16)
        for part in gift.parts():
            digest.update(part)
        return cls(member, tuple(outward), weight, digest.digest())

    def parts(self) -> list[Buffer]:
        """Return the buffers that make up the packet with everything."""
        table = _encoder.encode(Routed([_header(p.to, p.packet) for p in self.messages]))
        return _framed(table, [message.packet.data for message in self.messages])

    def packed(self) -> bytearray:
        """Return everything as one packet."""
        return bytearray().join(self.parts())

    def packed_for(self, member: str) -> bytearray:
        """Return what one member gets of it, as one packet; empty if that is nothing."""
        chosen = [p for p in self.messages if member in p.to]
        if not chosen:
            return bytearray()
        table = _encoder.encode(Routed([_header((member,), p.packet) for p in chosen]))
        return bytearray().join(_framed(table, [p.packet.data for p in chosen]))


@dataclass(frozen=True, slots=True)
class DeliveredMessage:
    """What one member gets in a swap."""

    packets: dict[str, list[Packet]]
    """Sender -> its packets, in the order in which it gave them; senders in slot order."""
    weights: dict[str, float]
    digest: str


@dataclass(frozen=True, slots=True)
class AllToAllMessages:
    """Everything that was given in a swap, as the one who hands it out sees it."""

    outgoing: tuple[Outgoing, ...]
    """In member order."""
    digest: str

    @classmethod
    def of(cls, outgoing: Sequence[Outgoing]) -> AllToAllMessages:
        """Return all gifts, in member order, with their common digest."""
        digest = all_to_all_digest({gift.member: gift.digest for gift in outgoing})
        return cls(tuple(outgoing), digest)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every contributor."""
        return {gift.member: gift.weight for gift in self.outgoing}

    def packets_for(self, member: str) -> dict[str, list[Packet]]:
        """Return what a member gets from others."""
        found = {g.member: [p.packet for p in g.messages if member in p.to] for g in self.outgoing}
        return {sender: packets for sender, packets in found.items() if packets}

    def for_member(self, member: str) -> Bundle:
        """Return what a member gets, ready to be sent in pieces."""
        packets = self.packets_for(member)
        headers = [_header((sender,), packet) for sender in packets for packet in packets[sender]]
        table = _encoder.encode(Received(headers, self.weights, self.digest))
        data = [packet.data for sender in packets for packet in packets[sender]]
        return Bundle(_framed(table, data))


class Bundle:
    """Several buffers that are sent as one packet, in pieces, without putting them together."""

    def __init__(self, parts: Sequence[Buffer]) -> None:
        """Hold views of the buffers."""
        self._parts = [memoryview(part) for part in parts if len(part)]
        self.nbytes = sum(len(part) for part in self._parts)

    def pieces(self, *, skip: Collection[int] = ()) -> Iterator[tuple[int, Buffer]]:
        """Yield index and bytes of each piece, without those in `skip`."""
        gathered, index = bytearray(), 0
        for part in self._parts:
            position = 0
            while position < len(part):
                taken = part[position : position + CHUNK_BYTES - len(gathered)]
                position += len(taken)
                gathered += taken
                if len(gathered) == CHUNK_BYTES:
                    if index not in skip:
                        yield index, gathered
                    gathered, index = bytearray(), index + 1
        if (gathered or not self.nbytes) and index not in skip:
            yield index, gathered


def open_outgoing(
    member: str, data: Buffer, *, weight: float, members: Collection[str]
) -> Outgoing:
    """Return what a member gave, from its packet; the parcels are views of it.

    Raises:
        WireError: the table is malformed, or does not fit the bytes, or names the sender itself or
            somebody outside the plan.
    """
    table, packets = _opened(data, Routed, sender=member)
    messages: list[PeerMessage] = []
    for header, packet in zip(table.headers, packets, strict=True):
        others = {*members} - {member}
        if not header.names or not set(header.names) <= others:
            raise WireError(
                f"a parcel of {member} is for nobody else in the plan",
                given=", ".join(header.names), expected=f"some of {', '.join(sorted(others))}",
            )  # fmt: skip
        messages.append(PeerMessage(tuple(header.names), packet))
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return Outgoing(member, tuple(messages), weight, digest)


def open_direct(sender: str, data: Buffer) -> list[Packet]:
    """Return what one member sent to this one; the packets are views.

    Raises:
        WireError: it is malformed.
    """
    return _opened(data, Routed, sender=sender)[1] if len(data) else []


def open_bundle(data: Buffer, *, me: str, members: Sequence[str]) -> DeliveredMessage:
    """Return what this member gets, from its packet; the packets are views of it.

    Raises:
        WireError: it is malformed, or names somebody outside the plan.
    """
    table, packets = _opened(data, Received, sender="the reducer")
    if list(table.weights) != [member for member in members if member in table.weights]:
        raise WireError("a swap has contributors outside the plan", given=str([*table.weights]))
    if not all(is_weight(weight) for weight in table.weights.values()):
        raise WireError("a swap has weights that are not usable", given=str(table.weights))
    found: dict[str, list[Packet]] = {}
    for header, packet in zip(table.headers, packets, strict=True):
        (sender,) = header.names if len(header.names) == 1 else ("",)
        if sender not in table.weights or sender == me:
            raise WireError("a parcel has no sender in the plan", given=", ".join(header.names))
        found.setdefault(sender, []).append(packet)
    ordered = {member: found[member] for member in members if member in found}
    return DeliveredMessage(ordered, table.weights, table.digest)


def all_to_all_digest(digests: Mapping[str, bytes]) -> str:
    """Return what members compare before they commit to a swap.

    Args:
        digests: Contributor -> digest of what it gave, in slot order.
    """
    return result_digest(list(digests.values()), list(digests))


def _header(names: Sequence[str], packet: Packet) -> Header:
    return Header(list(names), packet.codec, list(packet.sizes), len(packet.data))


def _framed(table: bytes, data: Sequence[Buffer]) -> list[Buffer]:
    """Return what a packet of parcels is made of."""
    parts: list[Buffer] = [_LENGTH.pack(len(table)), table, _padding(_LENGTH.size + len(table))]
    for each in data:
        parts += [each, _padding(len(each))]
    return parts


def _aligned(nbytes: int) -> int:
    return nbytes + -nbytes % ALIGNMENT


def _padding(nbytes: int) -> bytes:
    """Return what has to follow so many bytes."""
    return bytes(-nbytes % ALIGNMENT)


def _opened(data: Buffer, kind: type[TableT], *, sender: str) -> tuple[TableT, list[Packet]]:
    """Return the table and the packets behind it."""
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        if length > min(MAX_TABLE_BYTES, len(view) - _LENGTH.size):
            raise WireError("the table of parcels is too long", given=f"{length} bytes")
        decoder = _routed_decoder if kind is Routed else _received_decoder
        table = decoder.decode(view[_LENGTH.size : _LENGTH.size + length])
    except (struct.error, *MALFORMED) as error:
        raise WireError(f"the parcels of {sender} are malformed", given=str(error)) from error
    start = _aligned(_LENGTH.size + length)
    sizes = [_aligned(header.nbytes) for header in table.headers]
    if min(sizes, default=0) < 0 or start + sum(sizes) != len(view):
        raise WireError(
            f"the parcels of {sender} do not fit their table",
            given=f"{len(view) - start} bytes", expected=f"{sum(sizes)} bytes",
        )  # fmt: skip
    packets: list[Packet] = []
    for header, size in zip(table.headers, sizes, strict=True):
        packets.append(
            Packet(view[start : start + header.nbytes], header.codec, tuple(header.sizes))
        )
        start += size
    return table, packets  # type: ignore[return-value]
