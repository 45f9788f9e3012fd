"""Star: all members send to the first one, which combines the values and sends back the result.

The first member sends and receives n - 1 vectors, every other one. Values are encoded once per
direction with any codec, and the first member sees all contributions separately, so it can apply
every rule that needs no history.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import AtollError, PeerRefused
from atoll.group.collectives.bounded_process_group import BoundedProcessGroup, Exchanged
from atoll.reducer.combine import combine
from atoll.reducer.mean import Mean, Share, is_finite, is_weight, result_digest

_WEIGHT = struct.Struct("!d")
"""Precedes every packet: its weight, NaN if it does not count; in the answer the weights of all."""


def star(wires: BoundedProcessGroup, own: Share, *, codec: Codec, usable: bool) -> Exchanged:
    """Return the aggregate of all members' values; `usable`: whether the own values count.

    Raises:
        PeerRefused: a member sent something unusable.
        PeerLost: the aggregate needs more members.
    """
    before = replace(wires.moved)
    n, nbytes = len(wires.members), len(own.packet.data)
    weight = _WEIGHT.pack(own.weight if usable else math.nan)
    answer = torch.empty(n * _WEIGHT.size + nbytes, dtype=torch.uint8)
    if wires.rank == 0:
        shares = _collected(wires, replace(own, weight=own.weight if usable else math.nan))
        _fill(answer, _combined(shares, codec))
        wires.end(*(wires.send(answer, to) for to in range(1, n)))
    else:
        wires.end(wires.send(_bytes(weight, own.packet.data), 0))
        wires.end(wires.receive(answer, 0))
    sent, received = wires.moved.sent - before.sent, wires.moved.received - before.received
    data = memoryview(_numpy(answer))
    weights = [_WEIGHT.unpack_from(data, _WEIGHT.size * rank)[0] for rank in range(n)]
    packet = Packet(data[n * _WEIGHT.size :], own.packet.codec, own.packet.sizes)
    return _opened(wires.members, weights, packet, codec, sent, received)


def _collected(wires: BoundedProcessGroup, own: Share) -> list[Share]:
    size = _WEIGHT.size + len(own.packet.data)
    incoming = torch.empty(len(wires.members) - 1, size, dtype=torch.uint8)
    wires.end(*(wires.receive(row, rank) for rank, row in enumerate(incoming, start=1)))
    shares = [own]
    for member, row in zip(wires.members[1:], incoming, strict=True):
        data = memoryview(_numpy(row))
        packet = replace(own.packet, data=data[_WEIGHT.size :])
        shares.append(
            Share(member, packet, _WEIGHT.unpack_from(data)[0], aggregation=own.aggregation)
        )
    return shares


def _combined(shares: Sequence[Share], codec: Codec) -> tuple[list[float], Mean | None]:
    """Return the weight of each contribution, NaN if it does not count, and the aggregate."""
    for share in shares:
        if not math.isnan(share.weight) and not is_weight(share.weight):
            raise PeerRefused("a weight is not usable", given=f"{share.weight} of {share.member}")
    usable = [share for share in shares if not math.isnan(share.weight)]
    weights = [share.weight for share in shares]
    if not math.fsum(share.weight for share in usable) > 0:
        return weights, None
    mean = combine(usable, codec=codec, aggregation=shares[0].aggregation)
    named = set(mean.contributors)
    return [s.weight if s.member in named else math.nan for s in shares], mean


def _fill(answer: Tensor, combined: tuple[list[float], Mean | None]) -> None:
    weights, mean = combined
    head = b"".join(map(_WEIGHT.pack, weights))
    data = mean.packet.data if mean is not None else bytes(len(answer) - len(head))
    answer.copy_(_bytes(head, data))


def _opened(
    members: Sequence[str],
    weights: Sequence[float],
    packet: Packet,
    codec: Codec,
    sent: int,
    received: int,
) -> Exchanged:
    """Return the first member's answer, after checking it."""
    names = tuple(m for m, w in zip(members, weights, strict=True) if not math.isnan(w))
    counted = [weight for weight in weights if not math.isnan(weight)]
    if not all(map(is_weight, counted)):
        raise PeerRefused("a weight is not usable", given=f"{weights} from {members[0]}")
    if not math.fsum(counted) > 0:
        zero = torch.zeros(packet.num_elements)
        return Exchanged(zero, names, 0.0, "", sent, received)
    try:
        vector = codec.decode(packet)
    except AtollError as error:
        raise PeerRefused("the result cannot be decoded", given=str(error)) from error
    if not is_finite(vector):
        raise PeerRefused("the result is not finite", given=f"from {members[0]}")
    digest = result_digest(packet.data, names)
    return Exchanged(vector, names, math.fsum(counted), digest, sent, received)


def _bytes(*parts: Any) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _numpy(tensor: Tensor) -> Any:
    return tensor.numpy()
