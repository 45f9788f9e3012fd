"""All-to-all on the routes of a job: through the reducer, or directly between the members."""

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
"""Sent to all members before the sizes: weight and digest."""


def as_all_to_all_result(
    messages: Sequence[PeerMessage],
    delivered: DeliveredMessage,
    *,
    me: str,
    sent_bytes: int,
    received_bytes: int,
) -> AllToAllResult:
    """Return a member's result: the packets from others, and those that it sent to itself."""
    packets = dict(delivered.packets)
    own = [message.packet for message in messages if me in message.to]
    if own and me in delivered.weights:
        packets[me] = own
    ordered = {member: packets[member] for member in delivered.weights if member in packets}
    return AllToAllResult(ordered, delivered.weights, sent_bytes, received_bytes, delivered.digest)


def upload_of(gift: Outgoing) -> Packet:
    """Return all of a member's packets as one packet for the reducer."""
    return Packet(gift.packed(), ALL_TO_ALL, ())


def all_to_all_relay(answer: RelayedMean, *, me: str, members: Sequence[str]) -> DeliveredMessage:
    """Parse the reducer's answer; raises PeerRefused if it is malformed or not of the plan."""
    try:
        return open_bundle(answer.packet.data, me=me, members=members)
    except WireError as error:
        raise PeerRefused("the result of an all-to-all is not usable", given=str(error)) from error


def all_to_all_direct(
    wires: BoundedProcessGroup, gift: Outgoing
) -> tuple[DeliveredMessage, int, int]:
    """Run an all-to-all on a process group; return the packets, and bytes sent and received.

    First all members exchange sizes, weights and digests; then the messages travel in one
    collective. Raises PeerRefused if a member sent something unusable.
    """
    members, n = wires.members, len(wires.members)
    outgoing = [gift.packed_for(member) for member in members]
    facts = _gather_facts(wires, gift, [len(data) for data in outgoing])
    sizes = [row[wires.rank] for _, _, row in facts]
    if sum(sizes) > MAX_ALL_TO_ALL_BYTES:
        raise PeerRefused(
            "the members send too many bytes to this one",
            given=f"{sum(sizes)} bytes", expected=f"at most {MAX_ALL_TO_ALL_BYTES}",
        )  # fmt: skip
    incoming = torch.empty(sum(sizes), dtype=torch.uint8)
    if any(any(row) for _, _, row in facts):  # the same condition on every member
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
            raise PeerRefused("messages are not usable", given=str(error)) from error
        if found:
            packets[member] = found
    weights = {member: facts[index][0] for index, member in enumerate(members)}
    digest = all_to_all_digest({member: facts[index][1] for index, member in enumerate(members)})
    head_bytes = (n - 1) * (_FACTS.size + 8 * n)
    sent = sum(len(data) for data in outgoing) + head_bytes
    return DeliveredMessage(packets, weights, digest), sent, sum(sizes) + head_bytes


def _gather_facts(
    wires: BoundedProcessGroup, gift: Outgoing, sizes: Sequence[int]
) -> list[tuple[float, bytes, list[int]]]:
    """Return weight, digest and sizes of all members, in order; raises PeerRefused if invalid."""
    n = len(wires.members)
    row = struct.Struct(f"!{n}q")
    length = _FACTS.size + row.size
    own = bytearray(_FACTS.pack(gift.weight, gift.digest) + row.pack(*sizes))
    heads = torch.empty(n * length, dtype=torch.uint8)
    mine = torch.frombuffer(own, dtype=torch.uint8)
    wires.run(lambda: wires.group._allgather_base(heads, mine))
    whole = bytes_of(heads)
    facts: list[tuple[float, bytes, list[int]]] = []
    for index, member in enumerate(wires.members):
        head = whole[index * length : (index + 1) * length]
        weight, digest = _FACTS.unpack_from(head)
        found = list(row.unpack_from(head, _FACTS.size))
        if not is_weight(weight) or min(found) < 0 or found[index]:
            raise PeerRefused(
                "the sizes of a member's messages are not valid",
                given=f"weight {weight}, sizes {found} from {member}",
            )  # fmt: skip
        facts.append((weight, digest, found))
    return facts
