"""All-to-all exchanges of encoded vectors, used by gossip and pairwise methods.

A group settles the codecs of its reduces; these packets are encoded outside of it, and settled
here.
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
    """Result of an all-to-all exchange of vectors."""

    own: Mapping[str, Tensor]
    """Key -> the own vector, as its recipients decode it."""
    others: Mapping[str, Mapping[str, Tensor]]
    """Member -> key -> its vector; only members with all vectors finite and of the right size."""
    weights: Mapping[str, float]
    """Weight of each contributor, in slot order."""
    digest: str


class VectorAllToAll:
    """Encodes, exchanges and decodes vectors for one member; a round may be retried."""

    def __init__(self, group: Group, codec: Codec) -> None:
        """Use this group and codec; raises ConfigError if the codec does not encode every value."""
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

    def exchange(
        self,
        plan: RoundPlan,
        vectors: Mapping[str, Tensor],
        *,
        to: Sequence[str],
        weight: float,
        resting: Resting,
    ) -> AllToAllVectors:
        """Send vectors to members of a plan and receive theirs.

        Args:
            plan: The members.
            vectors: Key -> vector, finite, shape (n,), sent as float32; the same keys on every
                member.
            to: Recipients; if empty, nothing is encoded.
            weight: Sent to all members.
            resting: Surrounds the wait.

        Raises:
            GroupError: the exchange failed and may be retried.
        """
        if self._tried:
            self._codec.finish(committed=False)
        self._tried = True
        self._codec.set_round(plan.round)
        own, messages = dict(vectors), list[PeerMessage]()
        for key, vector in vectors.items() if to else ():
            packet = self._codec.encode(vector.float(), key=key)
            messages.append(PeerMessage(tuple(to), packet))
            if not self._exact:
                own[key] = self._codec.base.decode(packet)
        work = self._group.all_to_all(messages, weight=weight)
        with resting():
            got = work.wait()
        others: dict[str, Mapping[str, Tensor]] = {}
        for member, packets in got.packets.items():
            found = self._decoded(member, packets, own)
            if found is not None:
                others[member] = found
        return AllToAllVectors(own, others, got.weights, got.digest)

    def finish(self, *, committed: bool) -> None:
        """Commit or roll back the codec's state."""
        if self._tried:
            self._codec.finish(committed=committed)
        self._tried = False

    def _decoded(
        self, member: str, packets: Sequence[Packet], like: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor] | None:
        """Return a member's vectors, or None if they are unusable."""
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
