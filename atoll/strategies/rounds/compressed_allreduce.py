"""A mean that is compressed in both directions, with error feedback for both losses.

Legend: u_i the vector that member i wants to send, C the codec, S_j the part of the vector that
member j owns in this round, e a vector per member of which it uses the part it owns.

  c_i = C(u_i)                 each part to its owner
  u   = mean_i c_i[S_j] + e_j  at owner j
  c   = C(u) ;  e_j = u - c    the owner's answer, to all

The mean of the vectors sent, plus the sum over members of e, equals the vector received, plus the
sum over members of the new e: nothing is lost, whichever members own the parts later.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import PeerLost, PeerRefused, WireError
from atoll.group.base import PeerMessage
from atoll.group.collectives.topology import partition
from atoll.strategies.base import Traffic
from atoll.strategies.rounds.exchange import ExchangeContext, ExchangeResult, hashed
from atoll.wire.messages import RoundPlan

ALIGNMENT = 8
"""Parts are multiples of this many elements, besides the codec's block."""


@dataclass(frozen=True, slots=True)
class CompressedMean:
    """One member's result, and its new state if the round is committed."""

    mean: Tensor
    """The received vector, shape (n,); equal on every member."""
    sent: Tensor
    """The own values as decoded by the others, shape (n,)."""
    owned: slice
    """The part owned by this member."""
    left: Tensor
    """Loss of the own answer: the new part of e."""
    alone: bool = False
    """No other member took part, and nothing was compressed: `mean` is the values and all of e."""


def both_ways(
    floor: ExchangeContext, plan: RoundPlan, values: Tensor, owed: Tensor, *, codec: Codec
) -> ExchangeResult[CompressedMean]:
    """Return the result of two all-to-alls; see the module's docstring.

    `values` are u, `owed` is e, both of shape (n,), exchanged as float32. The codec MUST be
    stateless.

    Raises:
        PeerLost: an owner was lost, or this member was left out.
        PeerRefused: a member sent something unusable.
    """
    me, members = floor.group.me, plan.members
    if plan.route == "alone":
        whole = slice(0, values.numel())
        squeezed = CompressedMean(values + owed, values, whole, torch.zeros_like(owed), alone=True)
        return ExchangeResult(squeezed, (me,), floor.weight, "alone")
    values = values.float()
    sizes = parts_of(values.numel(), len(members), codec)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    places = {m: slice(a, a + n) for m, a, n in zip(members, starts, sizes, strict=True)}
    codec.set_round(plan.round)
    packets = {m: codec.encode(values[p].contiguous(), key="up") for m, p in places.items()}
    sent = torch.cat([codec.decode(packet) for packet in packets.values()])
    up = floor.all_to_all(
        [PeerMessage((m,), p) for m, p in packets.items() if m != me and p.num_elements]
    )
    if me not in up.weights:
        raise PeerLost("the others did not get what this member sent", given=me)
    given = {m: found[0] for m, found in up.packets.items() if found}
    mine = places[me]
    total = _mean({**given, me: packets[me]}, up.weights, codec, size=mine.stop - mine.start)
    total += owed[mine].float()
    answer = codec.encode(total, key="down")
    left = total - codec.decode(answer)
    others = tuple(member for member in members if member != me)
    down = floor.all_to_all([PeerMessage(others, answer)] if answer.num_elements else [])
    answers = {m: found[0] for m, found in down.packets.items() if found} | {me: answer}
    mean = torch.empty_like(values)
    for member, place in places.items():
        if place.stop > place.start:
            _answer(answers, member, codec, out=mean[place])
    squeezed = CompressedMean(mean, sent, mine, left)
    weight = math.fsum(up.weights.values())
    return ExchangeResult(squeezed, up.contributors, weight, hashed(up.digest, down.digest))


def parts_of(elements: int, peers: int, codec: Codec) -> list[int]:
    """Return the sizes of the parts that members own, in slot order."""
    block = math.lcm(int(getattr(codec, "block", 1)), ALIGNMENT)
    return partition(elements, peers, block=block)


def compressed_volume(codec: Codec, elements: int, peers: int, *, rank: int) -> Traffic:
    """Return the traffic of one member in one :func:`both_ways`."""
    if peers < 2:
        return Traffic(1, 0, 0, 0, 0)
    sizes = [codec.nbytes(n) if n else 0 for n in parts_of(elements, peers, codec)]
    own, others = sizes[rank], sum(sizes) - sizes[rank]
    every = others + own * (peers - 1)
    return Traffic(1, others + own, every, every, every)


def _mean(
    packets: Mapping[str, Packet], weights: Mapping[str, float], codec: Codec, *, size: int
) -> Tensor:
    """Return the weighted mean of the own part, in slot order."""
    total = torch.zeros(size)
    if not size:
        return total
    factors, divisor = _factors(list(weights.values()))
    for member, factor in zip(weights, factors, strict=True):
        packet = packets.get(member)
        if packet is None or packet.num_elements != size:
            raise _unusable(member, "no packet for this part")
        try:
            codec.decode_add(packet, out=total, weight=factor)
        except WireError as error:
            raise _unusable(member, str(error)) from error
        if not math.isfinite(float(total.abs().sum())):
            raise _unusable(member, "values that are not finite")
    return total.div_(divisor)


def _factors(weights: Sequence[float]) -> tuple[list[float], float]:
    """Return each contribution's factor and the divisor; equal weights become 1."""
    if len(set(weights)) == 1:
        return [1.0] * len(weights), float(len(weights))
    return list(weights), math.fsum(weights)


def _answer(answers: Mapping[str, Packet], owner: str, codec: Codec, *, out: Tensor) -> None:
    packet = answers.get(owner)
    if packet is None:
        raise PeerLost("the owner of a part was lost before it answered", given=owner)
    if packet.num_elements != out.numel():
        raise _unusable(owner, "a part of another size")
    try:
        codec.decode(packet, out=out)
    except WireError as error:
        raise _unusable(owner, str(error)) from error
    if not math.isfinite(float(out.abs().sum())):
        raise _unusable(owner, "values that are not finite")


def _unusable(member: str, what: str) -> PeerRefused:
    return PeerRefused("what a member sent cannot be used", given=f"{member}: {what}")
