"""Swaps on the real routes: through the reducer as a switch, or straight among the members."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from atoll.codec.base import Packet
from atoll.errors import PeerRefused, WireError
from atoll.group.base import AllToAllResult, PeerMessage
from atoll.group.collectives.collectives import BoundedProcessGroup, bytes_of
from atoll.group.routes.relay import MAX_ALL_TO_ALL_BYTES, RelayedMean
from atoll.reducer.all_to_all import (
    DeliveredMessage,
    Outgoing,
    all_to_all_digest,
    open_bundle,
    open_direct,
)
from atoll.reducer.mean import is_weight
from atoll.wire.chunks import ALL_TO_ALL

_FACTS = struct.Struct("!d16s")
"""What all tell all in front of a swap, before the sizes: weight and digest."""


def as_all_to_all_result(
    parcels: Sequence[PeerMessage],
    delivered: DeliveredMessage,
    *,
    me: str,
    sent_bytes: int,
    received_bytes: int,
) -> AllToAllResult:
    """Return what a member has after a swap: what came, and what it gave to itself.

    Args:
        parcels: What it gave.
        delivered: What came from others.
        me: Its name.
        sent_bytes: What it sent.
        received_bytes: What it received.
    """
    packets = dict(delivered.packets)
    own = [parcel.packet for parcel in parcels if me in parcel.to]
    if own and me in delivered.weights:
        packets[me] = own
    ordered = {member: packets[member] for member in delivered.weights if member in packets}
    return AllToAllResult(ordered, delivered.weights, sent_bytes, received_bytes, delivered.digest)


def upload_of(gift: Outgoing) -> Packet:
    """Return what goes to the reducer: everything that a member gives, as one packet."""
    return Packet(gift.packed(), ALL_TO_ALL, ())


def all_to_all_relay(answer: RelayedMean, *, me: str, members: Sequence[str]) -> DeliveredMessage:
    """Return what came back from the reducer.

    Raises:
        PeerRefused: it is malformed, or does not fit the plan.
    """
    try:
        return open_bundle(answer.packet.data, me=me, members=members)
    except WireError as error:
        raise PeerRefused("the result of a swap is not usable", given=str(error)) from error


def all_to_all_direct(
    wires: BoundedProcessGroup, gift: Outgoing
) -> tuple[DeliveredMessage, int, int]:
    """Swap on a process group; return what came, and the bytes sent and received.

    First all tell all how much they have for each, with weight and digest; then the parcels travel
    in one all-to-all.

    Args:
        wires: The members.
        gift: What this member gives.

    Raises:
        PeerRefused: what somebody sent is of no use.
    """
    members, n = wires.members, len(wires.members)
    outgoing = [gift.packed_for(member) for member in members]
    told = _tell_all(wires, gift, [len(data) for data in outgoing])
    sizes = [row[wires.rank] for _, _, row in told]
    if sum(sizes) > MAX_ALL_TO_ALL_BYTES:
        raise PeerRefused(
            "the members have too much for this one",
            given=f"{sum(sizes)} bytes", expected=f"at most {MAX_ALL_TO_ALL_BYTES}",
        )  # fmt: skip
    incoming = torch.empty(sum(sizes), dtype=torch.uint8)
    if any(any(row) for _, _, row in told):  # the same answer on every member
        given = bytearray().join(outgoing)
        sending = torch.frombuffer(given, dtype=torch.uint8) if given else torch.empty(
            0, dtype=torch.uint8
        )  # fmt: skip
        sent_sizes = [len(data) for data in outgoing]
        wires.run(lambda: wires.group.alltoall_base(incoming, sending, sizes, sent_sizes))
    packets: dict[str, list[Packet]] = {}
    for member, part in zip(members, torch.split(incoming, sizes), strict=True):
        try:
            found = open_direct(member, bytes_of(part))
        except WireError as error:
            raise PeerRefused("parcels are not usable", given=str(error)) from error
        if found:
            packets[member] = found
    weights = {member: told[index][0] for index, member in enumerate(members)}
    digest = all_to_all_digest({member: told[index][1] for index, member in enumerate(members)})
    head_bytes = (n - 1) * (_FACTS.size + 8 * n)
    sent = sum(len(data) for data in outgoing) + head_bytes
    return DeliveredMessage(packets, weights, digest), sent, sum(sizes) + head_bytes


def _tell_all(
    wires: BoundedProcessGroup, gift: Outgoing, sizes: Sequence[int]
) -> list[tuple[float, bytes, list[int]]]:
    """Return weight, digest and sizes of all members, in order.

    Raises:
        PeerRefused: somebody's weight or sizes cannot be.
    """
    n = len(wires.members)
    row = struct.Struct(f"!{n}q")
    length = _FACTS.size + row.size
    own = bytearray(_FACTS.pack(gift.weight, gift.digest) + row.pack(*sizes))
    heads = torch.empty(n * length, dtype=torch.uint8)
    mine = torch.frombuffer(own, dtype=torch.uint8)
    wires.run(lambda: wires.group._allgather_base(heads, mine))
    whole = bytes_of(heads)
    told: list[tuple[float, bytes, list[int]]] = []
    for index, member in enumerate(wires.members):
        head = whole[index * length : (index + 1) * length]
        weight, digest = _FACTS.unpack_from(head)
        found = list(row.unpack_from(head, _FACTS.size))
        if not is_weight(weight) or min(found) < 0 or found[index]:
            raise PeerRefused(
                "what a member tells of its parcels cannot be",
                given=f"weight {weight}, sizes {found} from {member}",
            )  # fmt: skip
        told.append((weight, digest, found))
    return told
