"""Weighted means over the members of one process group, and a broadcast of bytes.

With `auto`, fp32 is one all-reduce of the weighted values. Any other codec, and every rule that
needs the members' values separately, takes two steps: every member sends its encoded chunks to
their owners (all-to-all); each owner combines its chunk in member order and encodes the result;
then all gather the encoded results. Other collectives are in
:mod:`atoll.group.collectives.adding` and :mod:`atoll.group.collectives.star`. In every case all
members have the same bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import GroupError, PeerRefused
from atoll.group.aggregation import Aggregation
from atoll.group.collectives.adding import SUMS
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup as BoundedProcessGroup
from atoll.group.collectives.bounded_process_group import Exchanged as Exchanged
from atoll.group.collectives.bounded_process_group import TransferCounters
from atoll.group.collectives.star import star
from atoll.group.collectives.topology import partition
from atoll.reducer.block_view import Sliceable
from atoll.reducer.combine import combine
from atoll.reducer.mean import Share, is_finite, is_weight, result_digest
from atoll.wire.frames import Buffer

_HEAD = struct.Struct("!d")
"""Precedes every chunk: the sender's weight, NaN if its values are not usable."""

PLAIN = Aggregation()

ALIGNMENT = 1024
"""Chunks are multiples of this many elements, besides the codec's block."""


def weighted_mean(
    wires: BoundedProcessGroup,
    vector: Tensor,
    *,
    codec: Codec,
    weight: float,
    key: str,
    aggregation: Aggregation = PLAIN,
) -> Exchanged:
    """Return the mean (or, by other rules, another aggregate) of all members' values.

    `vector` are the own values, float32, shape (n,). Values that are not finite are left out.
    Without any weight the result has weight 0.

    Raises:
        PeerRefused: a member sent unusable values.
        PeerLost: the aggregate needs more members.
        ConfigError: the collective cannot carry the codec, or the aggregation needs the reducer.
    """
    aggregation.check_direct()
    aggregation.check_codec(codec.spec)
    usable = is_weight(weight) and _survives(vector, codec.base)
    share = Share(
        wires.members[wires.rank], Packet(b"", "", ()), weight, aggregation=aggregation.spec(key)
    )
    if aggregation.collective == "star":
        packet = codec.encode(vector, key=key) if usable else codec.base.encode(vector, key=key)
        return star(wires, replace(share, packet=packet), codec=codec.base, usable=usable)
    if codec.base.spec == "fp32" and codec.base is codec and not aggregation.robust:
        return _all_reduce(wires, vector, weight=weight, usable=usable, aggregation=aggregation)
    return _all_to_all(wires, vector, share, codec=codec, usable=usable, key=key)


def scatter_chunks(wires: BoundedProcessGroup, data: Buffer | None, *, nbytes: int) -> memoryview:
    """Broadcast the first member's bytes; `data` is None on all others, `nbytes` known to all."""
    tensor = torch.empty(nbytes, dtype=torch.uint8)
    if data is not None and nbytes:
        tensor.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if nbytes:
        wires.run(lambda: wires.group.broadcast(tensor, 0))
    return bytes_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's memory as bytes, without a copy."""
    flat: Any = tensor.view(torch.uint8).numpy()
    return memoryview(flat)


def check_weight(exchanged: Exchanged, members: Sequence[str]) -> Exchanged:
    """Return the result; raises GroupError if no finite contribution had a weight above 0."""
    if exchanged.weight > 0:
        return exchanged
    raise GroupError(
        "there is nothing to average",
        given=f"{len(exchanged.contributors)} of {len(members)} members with weight 0",
        expected="at least one finite contribution with a weight above 0",
    )


def _survives(vector: Tensor, codec: Codec) -> bool:
    """Return whether the values are finite, also after encoding (fp16 overflows)."""
    if vector.numel() == 0:
        return True
    extremes = torch.stack(torch.aminmax(vector))  # NaN if a value is
    return is_finite(extremes) and is_finite(codec.decode(codec.encode(extremes, key="extremes")))


def _split(weights: list[float], members: Sequence[str]) -> tuple[tuple[str, ...], float]:
    """Return the contributors and their total weight; unusable members have weight NaN."""
    for member, weight in zip(members, weights, strict=True):
        if not math.isnan(weight) and not is_weight(weight):
            raise PeerRefused("a weight is not usable", given=f"{weight} from {member}")
    contributors = tuple(
        m for m, weight in zip(members, weights, strict=True) if not math.isnan(weight)
    )
    return contributors, math.fsum(weight for weight in weights if not math.isnan(weight))


def _nothing(size: int, contributors: tuple[str, ...], moved: TransferCounters) -> Exchanged:
    return Exchanged(torch.zeros(size), contributors, 0.0, "", moved.sent, moved.received)


def _refused(contributors: Sequence[str]) -> PeerRefused:
    return PeerRefused(
        "the mean of the members' values is not finite",
        given=f"values of {', '.join(contributors)}, each reported as finite",
        expected="a route with a reducer, which checks each contribution",
    )


def _all_reduce(
    wires: BoundedProcessGroup,
    vector: Tensor,
    *,
    weight: float,
    usable: bool,
    aggregation: Aggregation,
) -> Exchanged:
    """All-reduce in fp32; each member's weight and usability travel in extra elements.

    Gloo adds each segment in ring order on one member and distributes the sum, so all members have
    the same bits, though not always those of a sum in member order.
    """
    n, size = len(wires.members), vector.numel()
    wire = torch.zeros(size + 2 * n)
    if usable:
        torch.mul(vector, weight, out=wire[:size])
        wire[size + 2 * wires.rank] = weight
        wire[size + 2 * wires.rank + 1] = 1.0
    moved = _summed(wires, wire, aggregation.collective)
    table = wire[size:].view(n, 2).tolist()
    weights = [weight if present else math.nan for weight, present in table]
    contributors, total = _split(weights, wires.members)
    if not total > 0:
        return _nothing(size, contributors, moved)
    mean = wire[:size].div_(total)
    if aggregation.rule.name == "sum":
        mean.mul_(sum(weight > 0 for weight in weights))
    if not is_finite(mean):
        raise _refused(contributors)
    digest = result_digest(bytes_of(mean), contributors)
    return Exchanged(mean, contributors, total, digest, moved.sent, moved.received)


def _summed(wires: BoundedProcessGroup, wire: Tensor, collective: str) -> TransferCounters:
    """Replace a vector by the sum over all members; return the bytes moved."""
    if collective != "auto" or wires.ring:
        before = TransferCounters(wires.moved.sent, wires.moved.received)
        SUMS["ring" if collective == "auto" else collective](wires.in_ring_order(), wire)
        return TransferCounters(
            wires.moved.sent - before.sent, wires.moved.received - before.received
        )
    wires.run(lambda: wires.group.allreduce([wire]))
    n = len(wires.members)
    moved = round(2 * (n - 1) / n * wire.numel() * wire.element_size())
    return TransferCounters(moved, moved)


def _all_to_all(
    wires: BoundedProcessGroup, vector: Tensor, own: Share, *, codec: Codec, usable: bool, key: str
) -> Exchanged:
    """Send encoded chunks to their owners, combine there, gather the encoded results."""
    base, n = codec.base, len(wires.members)
    block = math.lcm(int(getattr(base, "block", 1)), ALIGNMENT)
    sizes = partition(vector.numel(), n, block=block)
    head = _HEAD.pack(own.weight if usable else math.nan)
    packets = _chunks(vector, sizes, codec=codec if usable else base, key=key)
    shares, moved_out, moved_in = _scatter(wires, packets, head)
    contributors, total = _split([share.weight for share in shares], wires.members)
    if not total > 0:
        return _nothing(vector.numel(), contributors, TransferCounters(moved_out, moved_in))
    usable_shares = [
        replace(share, aggregation=own.aggregation)
        for share in shares
        if not math.isnan(share.weight)
    ]
    mean = combine(usable_shares, codec=base, aggregation=own.aggregation)
    if mean.left_out:
        # Owners of other chunks do not know this; the relay can leave the member out everywhere.
        error = next(iter(mean.left_out.values()))
        raise PeerRefused("a member's values are not usable", given=str(error)) from error
    gathered = _gather(wires, mean.packet, [base.nbytes(size) for size in sizes])
    out = torch.empty(vector.numel())
    for part, size, piece in zip(gathered, sizes, torch.split(out, sizes), strict=True):
        base.decode(Packet(part, mean.packet.codec, (size,)), out=piece)
    if not is_finite(out):
        raise _refused(contributors)
    others = sum(len(part) for part in gathered) - len(gathered[wires.rank])
    shared = len(gathered[wires.rank]) * (n - 1)
    return Exchanged(
        out, contributors, total, result_digest(gathered, contributors),
        moved_out + shared, moved_in + others,
    )  # fmt: skip


def _chunks(vector: Tensor, sizes: Sequence[int], *, codec: Codec, key: str) -> list[Packet]:
    """Return one packet per chunk; the residual belongs to the whole vector, for any partition."""
    base = codec.base
    if base is not codec:
        whole = codec.encode(vector, key=key)
        if isinstance(base, Sliceable) and all(size % base.grain == 0 for size in sizes[:-1]):
            stops = accumulate(sizes)
            return [
                base.cut(whole, stop - size, stop) if size else base.encode(vector[:0], key=key)
                for size, stop in zip(sizes, stops, strict=True)
            ]
        # Encoding the decoded values once more, block by block, changes nothing.
        vector = base.decode(whole)
    return [base.encode(part.contiguous(), key=key) for part in torch.split(vector, list(sizes))]


def _scatter(
    wires: BoundedProcessGroup, packets: list[Packet], head: bytes
) -> tuple[list[Share], int, int]:
    """Send every member its chunk; return all versions of the own chunk, in member order."""
    rank, members = wires.rank, wires.members
    messages = [b"".join((head, p.data)) if i != rank else b"" for i, p in enumerate(packets)]
    sent_sizes = [len(message) for message in messages]
    own = len(packets[rank].data) + _HEAD.size
    received_sizes = [own if index != rank else 0 for index in range(len(members))]
    outgoing = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    incoming = torch.empty(sum(received_sizes), dtype=torch.uint8)
    wires.run(lambda: wires.group.alltoall_base(incoming, outgoing, received_sizes, sent_sizes))
    shares: list[Share] = []
    for member, part in zip(members, torch.split(incoming, received_sizes), strict=True):
        packet, own_head = packets[rank], head
        if member != members[rank]:
            data = bytes_of(part)
            own_head = bytes(data[: _HEAD.size])
            packet = Packet(data[_HEAD.size :], packet.codec, packet.sizes)
        shares.append(Share(member, packet, _HEAD.unpack(own_head)[0]))
    return shares, sum(sent_sizes), sum(received_sizes)


def _gather(wires: BoundedProcessGroup, packet: Packet, sizes: list[int]) -> list[memoryview]:
    """Return every member's encoded mean, in order, padded to one length on the wire."""
    longest = max(sizes)
    if longest == 0:
        return [memoryview(b"") for _ in sizes]
    padded = torch.zeros(longest, dtype=torch.uint8)
    if len(packet.data):
        padded[: len(packet.data)] = torch.frombuffer(bytearray(packet.data), dtype=torch.uint8)
    gathered = torch.empty(longest * len(sizes), dtype=torch.uint8)
    wires.run(lambda: wires.group._allgather_base(gathered, padded))
    whole = bytes_of(gathered)
    return [whole[i * longest : i * longest + size] for i, size in enumerate(sizes)]
