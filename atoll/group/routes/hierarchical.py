"""The hierarchical route: direct inside a site, one member per site over the relay.

A site is a set of members with direct connections. They average directly; the first member, the
delegate, sends the site's mean, weight and contributors to the reducer and broadcasts the bytes of
the answer. So every member of the job decodes the same bytes, and the wide-area network carries one
vector per site instead of one per member.

This is the two-level reduce of hierarchical all-reduce (Jia et al. 2018, "Highly Scalable Deep
Learning Training System with Mixed-Precision", https://arxiv.org/abs/1807.11205, section 4) with
the hub's reducer as the upper level. Differs from it: the mean of a site is encoded for the upper
level, with the same loss as encoding a result on other routes; error feedback covers only the loss
of each member's own values.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from atoll.codec.base import Packet
from atoll.errors import AtollError, GroupError, PeerLost, PeerRefused, WireError, from_dict
from atoll.group.collectives.collectives import (
    BoundedProcessGroup,
    Exchanged,
    scatter_chunks,
    weighted_mean,
)
from atoll.group.routes.direct import DirectGroup, DirectRoute
from atoll.group.routes.relay import RelayedMean, check_result, decode_mean
from atoll.group.routes.requests import ReduceRequest
from atoll.wire.chunks import MAX_HEAD_BYTES
from atoll.wire.frames import Buffer
from atoll.wire.malformed import MALFORMED
from atoll.wire.messages import RoundPlan

_LENGTHS = struct.Struct("!qq")
"""Bytes of the head and of the data that a delegate broadcasts."""

ViaReducer = Callable[[Packet, float, Sequence[str]], RelayedMean]
"""Sends packet, weight and contributors to the reducer; returns the mean."""


class SiteResult(msgspec.Struct, frozen=True, array_like=True):
    """The head that a delegate broadcasts before the result."""

    contributors: list[str] = []
    weight: float = 0.0
    codec: str = ""
    error: dict[str, str] | None = None


_heads = msgspec.msgpack.Decoder(SiteResult)


def site_of(plan: RoundPlan, member: str) -> tuple[tuple[str, ...], str]:
    """Return the site of a member and its store (empty: the member is alone).

    Raises:
        WireError: the plan has no site for the member.
    """
    for site, store in zip(plan.sites, plan.stores, strict=False):
        if member in site:
            return tuple(site), store
    raise WireError("a hierarchical plan has no site for this member", given=member)


def reduce_by_sites(
    request: ReduceRequest, *, me: str, direct: DirectRoute | None, via_reducer: ViaReducer
) -> Exchanged:
    """Return the weighted mean over all members of the plan; `direct` None: no direct connections.

    Raises:
        PeerLost: a member of the site, the delegate's connection or the reducer was lost.
        PeerRefused: the result does not fit the plan.
        DeadlineExceeded: it took longer than `plan.timeout_s`.
        GroupError: nothing was left to average, or the contribution was refused.
    """
    plan, vector, codec, key = request.plan, request.vector, request.codec, request.key
    site, store = site_of(plan, me)
    if len(site) == 1:
        mean = via_reducer(codec.encode(vector, key=key), request.weight, (me,))
        return decode_mean(mean, len(vector), sent=mean.sent_bytes, received=mean.received_bytes)
    if direct is None:
        raise GroupError("this member cannot be dialled", given="a site of several members")
    meeting = replace(DirectGroup.of(plan), members=site, store=store)
    inside = direct.meet(
        meeting,
        lambda wires: weighted_mean(wires, vector, codec=codec, weight=request.weight, key=key),
        serial=request.serial,
        anew=request.phase == 0,
    )
    answer: RelayedMean | AtollError | None = None
    if me == site[0]:
        packet = replace(
            codec.base.mean_codec().encode(inside.vector, key=key), sizes=(len(vector),)
        )
        try:
            answer = via_reducer(packet, inside.weight, inside.contributors)
        except AtollError as error:
            answer = error
    most = codec.base.nbytes(len(vector))
    mean = direct.meet(
        meeting, lambda wires: _hand_down(wires, answer, elements=len(vector), most=most),
        serial=request.serial, anew=False,
    )  # fmt: skip
    check_result(plan, mean.contributors, mean.weight)
    return decode_mean(
        mean, len(vector), sent=inside.sent_bytes + mean.sent_bytes,
        received=inside.received_bytes + mean.received_bytes,
    )  # fmt: skip


def _hand_down(
    wires: BoundedProcessGroup, answer: RelayedMean | AtollError | None, *, elements: int, most: int
) -> RelayedMean:
    """Broadcast the delegate's answer to its site; `answer` is None on the other members.

    `most` is the size of a result in this codec.
    """
    head: bytes = b""
    data: Buffer = b""
    if isinstance(answer, AtollError):
        head = msgspec.msgpack.encode(SiteResult(error=answer.to_dict()))
    elif answer is not None:
        data = answer.packet.data
        head = msgspec.msgpack.encode(
            SiteResult(list(answer.contributors), answer.weight, answer.packet.codec)
        )
    lengths = _LENGTHS.pack(len(head), len(data)) if answer is not None else None
    head_bytes, data_bytes = _LENGTHS.unpack(scatter_chunks(wires, lengths, nbytes=_LENGTHS.size))
    if not (0 <= head_bytes <= MAX_HEAD_BYTES and 0 <= data_bytes <= most):
        raise PeerRefused(
            "the delegate of this site sent an invalid result",
            given=f"{data_bytes} bytes", expected=f"at most {most} bytes",
        )  # fmt: skip
    both = scatter_chunks(
        wires, b"".join((head, data)) if answer is not None else None,
        nbytes=head_bytes + data_bytes,
    )  # fmt: skip
    if isinstance(answer, AtollError):
        raise answer
    if answer is not None:
        copies = (len(wires.members) - 1).bit_length()  # Gloo broadcasts on a binary tree
        return replace(answer, sent_bytes=answer.sent_bytes + len(both) * copies)
    return _received_mean(both, head_bytes, elements)


def _received_mean(both: memoryview, head_bytes: int, elements: int) -> RelayedMean:
    try:
        head = _heads.decode(both[:head_bytes])
    except MALFORMED as error:
        raise PeerRefused(
            "the result sent by the delegate is malformed", given=str(error)
        ) from error
    if head.error is not None:
        reason = from_dict(head.error)
        raise PeerLost("the delegate of this site got no mean", given=str(reason)) from reason
    packet = Packet(both[head_bytes:], head.codec, (elements,))
    return RelayedMean(packet, tuple(head.contributors), head.weight, 0, len(both))
