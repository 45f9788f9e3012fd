"""Outcomes of an exchange, and the pieces in which each member receives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from atoll.errors import AtollError
from atoll.reducer.all_to_all import AllToAllMessages, Bundle
from atoll.reducer.mean import Mean, Share
from atoll.verification.trace import packet_digest
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, count_pieces, pack_chunk
from atoll.wire.frames import Buffer
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import Look, Received, RoundPlan

Parts = Iterator[tuple[Buffer, Buffer]]
"""Heads and pieces, the parts of relay frames."""


@dataclass(frozen=True, slots=True)
class ExchangeOutcome:
    """A mean, equal for all members, or the messages of an all-to-all."""

    plan: RoundPlan
    phase: int
    what: Mean | AllToAllMessages

    def parts(self, member: str, *, skip: Collection[int]) -> Parts:
        """Yield a member's pieces, without those in `skip`."""
        if isinstance(self.what, Mean):
            return result_parts(self.plan, self.what, skip=skip, phase=self.phase)
        return all_to_all_parts(self.plan, self.what, member, skip=skip, phase=self.phase)


def in_slot_order(mean: Mean, plan: RoundPlan) -> Mean:
    """Return the mean with its contributors in slot order, also if members sent for a site."""
    named = set(mean.contributors)
    return replace(mean, contributors=tuple(m for m in plan.members if m in named))


def received(plan: RoundPlan, shares: Sequence[Share], looks: Mapping[str, Look]) -> Received:
    """Return the report of what every member sent, for the verification of its round."""
    packets = {
        share.member: packet_digest(share.packet.codec, share.weight, share.packet.data)
        for share in shares
    }
    return Received(plan.epoch, packets, dict(looks))


def result_parts(
    plan: RoundPlan, mean: Mean, *, skip: Collection[int] = (), only: Collection[int] | None = None,
    phase: int = 0, kind: str = "result",
) -> Parts:  # fmt: skip
    """Yield the pieces of a mean, `only` some of them, without those in `skip`."""
    data = memoryview(mean.packet.data)
    count = count_pieces(len(data))
    head = ChunkHead(
        kind=kind, epoch=plan.epoch, round=plan.round, index=0, count=count,
        total_bytes=len(data), codec=mean.packet.codec, sizes=list(mean.packet.sizes),
        weight=mean.weight, contributors=list(mean.contributors), phase=phase,
    )  # fmt: skip
    for index in range(count) if only is None else only:
        if index not in skip:
            piece = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
            yield pack_chunk(msgspec.structs.replace(head, index=index), piece)


def all_to_all_parts(
    plan: RoundPlan, routed: AllToAllMessages, member: str, *, skip: Collection[int], phase: int
) -> Parts:
    """Yield the pieces of one member's messages, without those in `skip`."""
    bundle: Bundle = routed.for_member(member)
    weights = routed.weights
    head = ChunkHead(
        kind="result", epoch=plan.epoch, round=plan.round, index=0,
        count=count_pieces(bundle.nbytes), total_bytes=bundle.nbytes, codec=ALL_TO_ALL, sizes=[],
        weight=sum(weights.values()), contributors=list(weights), phase=phase,
    )  # fmt: skip
    for index, piece in bundle.pieces(skip=skip):
        yield pack_chunk(msgspec.structs.replace(head, index=index), piece)


def list_of_pieces(
    plan: RoundPlan, phase: int, have: list[int], *, total_bytes: int, ask: bool
) -> tuple[Buffer, Buffer]:
    """Return the parts that list what has come of a contribution, or `ask` for such a list."""
    head = ChunkHead(
        kind="resume", epoch=plan.epoch, round=plan.round, index=len(have), count=int(ask),
        total_bytes=total_bytes, codec="", sizes=[], weight=0.0, have=have, phase=phase,
    )  # fmt: skip
    return pack_chunk(head)


def refusal(error: AtollError, epoch: int, round_: int, *, phase: int) -> tuple[Buffer, Buffer]:
    """Return the parts that tell a member why there is no result for it."""
    piece = msgspec.msgpack.encode(error.to_dict())[:CHUNK_BYTES]
    head = ChunkHead(
        kind="refused", epoch=epoch, round=round_, index=0, count=1, total_bytes=len(piece),
        codec="", sizes=[], weight=0.0, phase=phase,
    )  # fmt: skip
    return pack_chunk(head, piece)
