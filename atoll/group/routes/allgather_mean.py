"""Means for codecs that cannot encode a mean: all members gather all packets and sum them.

The sum of sparse packets does not fit a packet of the same size. So every member receives all
packets unchanged, decodes them and sums in member order: the same bits everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import PeerRefused
from atoll.group.base import AllToAllResult, PeerMessage, Reduced, unflatten
from atoll.reducer.combine import averaged
from atoll.reducer.mean import Share, minority, result_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AllgatherMean:
    """One reduce by all-gather."""

    me: str
    codec: Codec
    aggregation: str
    round: int
    like: Sequence[Tensor]
    """Tensors in the shapes of the result."""

    def messages(self, vector: Tensor, *, key: str, members: Sequence[str]) -> list[PeerMessage]:
        """Return this member's encoded values, addressed to all."""
        return [PeerMessage(tuple(members), self.codec.encode(vector, key=key))]

    def reduced(self, got: AllToAllResult) -> Reduced:
        """Return the mean over all contributions.

        Raises:
            GroupError: nothing is usable, or this member's contribution is incompatible.
            PeerRefused: a member did not send exactly one vector.
        """
        shares = [
            Share(
                member,
                _only(member, got.packets.get(member, ())),
                weight,
                aggregation=self.aggregation,
            )
            for member, weight in got.weights.items()
        ]
        odd = minority(shares)
        if self.me in odd:
            raise odd[self.me]
        mean = averaged(
            [share for share in shares if share.member not in odd], codec=self.codec,
            aggregation=self.aggregation, round_=self.round,
        )  # fmt: skip
        for member, error in (odd | mean.left_out).items():
            log.warning("left %s out of round %s: %s", member, self.round, error)
        return Reduced(
            tensors=unflatten(mean.vector, self.like), contributors=mean.contributors,
            weight=mean.weight, sent_bytes=got.sent_bytes, received_bytes=got.received_bytes,
            digest=result_digest(got.digest.encode(), mean.contributors),
        )  # fmt: skip


def _only(member: str, packets: Sequence[Packet]) -> Packet:
    if len(packets) != 1:
        raise PeerRefused(
            "a member sent more or less than one vector",
            given=f"{len(packets)} packets from {member}", expected="one",
        )  # fmt: skip
    return packets[0]
