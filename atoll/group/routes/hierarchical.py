"""The hierarchical route: direct inside a site, one member of each site over the relay.

A site is a set of members that can dial each other. They average directly; the first of them, the
delegate, sends the site's mean with the site's whole weight to the reducer, names whose values are
in it, and hands the very bytes that come back to its site. So every member of the job decodes the
same bytes, and the wide network carries one vector per site instead of one per member.

This is the two-level reduce of hierarchical all-reduce (Jia et al. 2018, "Highly Scalable Deep
Learning Training System with Mixed-Precision", https://arxiv.org/abs/1807.11205, section 4) with
the hub's reducer as the upper level. Differs from it: the mean of a site is encoded for the upper
level, which loses as much as encoding a result does on the other routes; error feedback covers what
each member's own values lose.
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
"""Bytes of the head and of the data that a delegate hands to its site."""

ViaReducer = Callable[[Packet, float, Sequence[str]], RelayedMean]
"""Sends a packet with its weight and contributors to the reducer and returns the mean."""


class SiteResult(msgspec.Struct, frozen=True, array_like=True):
    """What a delegate tells its site in front of the result."""

    contributors: list[str] = []
    weight: float = 0.0
    codec: str = ""
    error: dict[str, str] | None = None
    """Why there is no result."""


_heads = msgspec.msgpack.Decoder(SiteResult)


def site_of(plan: RoundPlan, member: str) -> tuple[tuple[str, ...], str]:
    """Return the site of a member and where its board is (empty: it is alone there).

    Raises:
        WireError: the plan has no such site.
    """
    for site, board in zip(plan.sites, plan.stores, strict=False):
        if member in site:
            return tuple(site), board
    raise WireError("a hierarchical plan has no site for this member", given=member)


def reduce_by_sites(
    request: ReduceRequest, *, me: str, direct: DirectRoute | None, via_reducer: ViaReducer
) -> Exchanged:
    """Return the weighted mean over all members of the plan.

    Args:
        request: The reduce; its plan names the sites.
        me: Own member id.
        direct: Meets the members of the own site; None if this member cannot be dialled.
        via_reducer: Talks to the reducer.

    Raises:
        PeerLost: a member of the site, its delegate's connection or the reducer was lost.
        PeerRefused: the result does not fit.
        DeadlineExceeded: it took longer than `plan.timeout_s`.
        GroupError: nothing was left to average, or the contribution was refused.
    """
    plan, vector, codec, key = request.plan, request.vector, request.codec, request.key
    site, board = site_of(plan, me)
    if len(site) == 1:
        mean = via_reducer(codec.encode(vector, key=key), request.weight, (me,))
        return decode_mean(mean, len(vector), sent=mean.sent_bytes, received=mean.received_bytes)
    if direct is None:
        raise GroupError("this member cannot be dialled", given="a site of several members")
    meeting = replace(DirectGroup.of(plan), members=site, board=board)
    inside = direct.meet(
        meeting,
        lambda wires: weighted_mean(wires, vector, codec=codec, weight=request.weight, key=key),
        serial=request.serial,
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
    """Return the delegate's answer on every member of its site; `answer` is None on the others.

    Args:
        wires: The site.
        answer: What the delegate got from the reducer.
        elements: Length of the vector.
        most: Bytes that a result of this codec has.
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
            "the delegate of this site hands down what is no result",
            given=f"{data_bytes} bytes", expected=f"at most {most} bytes",
        )  # fmt: skip
    both = scatter_chunks(
        wires, b"".join((head, data)) if answer is not None else None,
        nbytes=head_bytes + data_bytes,
    )  # fmt: skip
    if isinstance(answer, AtollError):
        raise answer
    if answer is not None:
        copies = (len(wires.members) - 1).bit_length()  # it goes down a binary tree
        return replace(answer, sent_bytes=answer.sent_bytes + len(both) * copies)
    return _taken(both, head_bytes, elements)


def _taken(both: memoryview, head_bytes: int, elements: int) -> RelayedMean:
    """Return what the delegate handed down."""
    try:
        told = _heads.decode(both[:head_bytes])
    except MALFORMED as error:
        raise PeerRefused("what the delegate hands down is malformed", given=str(error)) from error
    if told.error is not None:
        reason = from_dict(told.error)
        raise PeerLost("the delegate of this site got no mean", given=str(reason)) from reason
    packet = Packet(both[head_bytes:], told.codec, (elements,))
    return RelayedMean(packet, tuple(told.contributors), told.weight, 0, len(both))
