"""Encoded vectors for named members: what gossip and pairs exchange in a round.

A group settles the codecs of its reduces; here packets are made outside of it, so this settles.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.codec.base import Codec, Packet
from atoll.errors import AtollError, ConfigError
from atoll.group.base import Group, PeerMessage, Resting
from atoll.strategies.vectors.flat import length
from atoll.wire.messages import RoundPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AllToAllVectors:
    """What one swap of vectors brought."""

    own: Mapping[str, Tensor]
    """Key -> the own vector, as those who got it decode it."""
    others: Mapping[str, Mapping[str, Tensor]]
    """Member -> key -> its vector; only of members of whom all came, finite and of the right size.
    """
    weights: Mapping[str, float]
    """What each contributor told, in slot order; who was lost is left out."""
    digest: str


class VectorAllToAll:
    """Encodes, swaps and decodes, for one member; a round may be tried several times."""

    def __init__(self, group: Group, codec: Codec) -> None:
        """Use this group and this codec.

        Raises:
            ConfigError: the codec does not encode whole vectors of values.
        """
        if codec.needs_allgather or codec.spec.startswith("ef21") or "randomk" in codec.spec:
            raise ConfigError(
                "this codec sends differences or a few values, and members here need each other's "
                "whole parameters",
                given=codec.spec, expected="a codec that encodes every value",
                remedy='codec = "int8" or "feedback(int8)"',
            )  # fmt: skip
        self._group, self._codec = group, codec
        self._exact = codec.base is codec and codec.spec == "fp32"
        self._tried = False

    def swap(
        self,
        plan: RoundPlan,
        vectors: Mapping[str, Tensor],
        *,
        to: Sequence[str],
        weight: float,
        resting: Resting,
    ) -> AllToAllVectors:
        """Give vectors to members of a plan and get theirs.

        Args:
            plan: Who takes part.
            vectors: Key -> vector, finite, float32, shape (n,); on every member the same keys.
            to: Who gets them; nobody: they are not encoded.
            weight: Told to all.
            resting: Surrounds the wait.

        Raises:
            GroupError: the swap failed; it may be tried again.
        """
        if self._tried:
            self._codec.finish(committed=False)
        self._tried = True
        self._codec.set_round(plan.round)
        own, parcels = dict(vectors), list[PeerMessage]()
        for key, vector in vectors.items() if to else ():
            packet = self._codec.encode(vector, key=key)
            parcels.append(PeerMessage(tuple(to), packet))
            if not self._exact:
                own[key] = self._codec.base.decode(packet)
        work = self._group.swap(parcels, weight=weight)
        with resting():
            got = work.wait()
        others: dict[str, Mapping[str, Tensor]] = {}
        for member, packets in got.packets.items():
            found = self._decoded(member, packets, own)
            if found is not None:
                others[member] = found
        return AllToAllVectors(own, others, got.weights, got.digest)

    def finish(self, *, committed: bool) -> None:
        """Tell the codec what became of the round."""
        if self._tried:
            self._codec.finish(committed=committed)
        self._tried = False

    def _decoded(
        self, member: str, packets: Sequence[Packet], like: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Return a member's vectors; None if they are of no use, as if it had not been there."""
        if len(packets) != len(like):
            return None
        found: dict[str, Tensor] = {}
        for (key, own), packet in zip(like.items(), packets, strict=True):
            try:
                vector = self._codec.base.decode(packet)
            except AtollError as error:
                log.warning("what %s sent is not usable: %s", member, error)
                return None
            if vector.shape != own.shape or not math.isfinite(length(vector)):
                log.warning("what %s sent is not finite, or of another size", member)
                return None
            found[key] = vector
        return found
