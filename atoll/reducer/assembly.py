"""Assembles the pieces of every member's contribution to one exchange.

Pure and bounded: only members of the plan may send, and a contribution has exactly the size that
its codec's formula gives. Pieces may arrive in any order and repeatedly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import WireError
from atoll.reducer.mean import Share, bad_weight, is_weight
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, count_pieces
from atoll.wire.limits import CHUNK_BYTES

MAX_CONTRIBUTION_BYTES = 16 * 2**30
"""Largest encoded vector accepted from one member."""


def expected_bytes(codec: str, elements: int) -> int:
    """Return the size of an encoded vector; raises ConfigError if the codec is unknown."""
    return make_codec(codec).nbytes(elements)


@dataclass(slots=True)
class Contribution:
    """The pieces received so far of one member's encoded vector."""

    codec: str
    sizes: tuple[int, ...]
    weight: float
    total_bytes: int
    contributors: tuple[str, ...]
    aggregation: str
    """How values are aggregated, see :mod:`atoll.reducer.aggregation`."""
    data: memoryview
    """Pages are allocated when a piece is written, so a size that is only announced uses none."""
    have: set[int] = field(default_factory=set)
    prefix: int = 0
    """Pieces from the first one on without a gap."""

    @property
    def complete(self) -> bool:
        """Whether every piece has arrived."""
        return len(self.have) == count_pieces(self.total_bytes)

    def put(self, head: ChunkHead, piece: memoryview) -> None:
        """Store one piece; ignore repeated ones. Raises WireError for a piece of another packet."""
        facts = (
            head.codec, tuple(head.sizes), head.weight, head.total_bytes, head.count,
            tuple(head.contributors) or self.contributors, head.aggregation,
        )  # fmt: skip
        own = (
            self.codec, self.sizes, self.weight, self.total_bytes, count_pieces(self.total_bytes),
            self.contributors, self.aggregation,
        )  # fmt: skip
        if facts != own:
            raise WireError(
                "pieces of one packet contradict each other", given=str(facts), expected=str(own)
            )
        if head.index not in self.have:
            start = head.index * CHUNK_BYTES
            self.data[start : start + len(piece)] = piece
            self.have.add(head.index)
            while self.prefix in self.have:
                self.prefix += 1


class Assembly:
    """The contributions to one exchange; complete when no live member's is missing."""

    def __init__(
        self,
        members: Sequence[str],
        *,
        sites: Mapping[str, Sequence[str]] | None = None,
        max_bytes: int = MAX_CONTRIBUTION_BYTES,
        size_of: Callable[[str, int], int] = expected_bytes,
    ) -> None:
        """Expect one contribution from each member, given in the order of the sum.

        `sites` maps a sender to the members that it represents, by default itself.
        """
        self.members = tuple(members)
        self._sites = {m: tuple((sites or {}).get(m, (m,))) for m in members}
        self._waited_for = set(members)
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._parts: dict[str, Contribution] = {}

    def add(self, member: str, head: ChunkHead, piece: memoryview) -> bool:
        """Store one piece and return whether the member's contribution is complete.

        Raises:
            WireError: the sender is not in the plan or sends for another site, the packet's size
                does not match codec and sizes, or its pieces are inconsistent.
            GroupError: its weight is not usable.
        """
        if member not in self.members:
            raise WireError(
                "a contribution came from outside the plan",
                given=member, expected=", ".join(self.members),
            )  # fmt: skip
        part = self._parts.get(member)
        if part is None:
            part = self._parts[member] = self._open(member, head)
        part.put(head, piece)
        return part.complete

    def _open(self, member: str, head: ChunkHead) -> Contribution:
        """Return an empty contribution with the layout of its first piece."""
        if any(size < 0 for size in head.sizes):
            raise WireError("a tensor has a negative size", given=str(head.sizes))
        expected = max(0, head.total_bytes)
        if head.codec != ALL_TO_ALL or head.sizes:
            expected = self._size_of(head.codec, sum(head.sizes))
        if head.total_bytes != expected or head.count != count_pieces(expected):
            raise WireError(
                f"the contribution of {member} has the wrong size",
                given=f"{head.total_bytes} bytes in {head.count} pieces",
                expected=f"{expected} bytes for {sum(head.sizes)} elements in {head.codec}",
            )
        if expected > self._max_bytes:
            raise WireError(
                f"the contribution of {member} is too large",
                given=f"{expected} bytes", expected=f"at most {self._max_bytes} bytes",
            )  # fmt: skip
        if not is_weight(head.weight):
            raise bad_weight(Share(member, Packet(b"", head.codec, ()), head.weight))
        return Contribution(
            codec=head.codec, sizes=tuple(head.sizes), weight=head.weight,
            total_bytes=expected, contributors=self._names(member, head),
            aggregation=head.aggregation,
            data=np.zeros(expected, dtype=np.uint8).data,
        )  # fmt: skip

    def _names(self, member: str, head: ChunkHead) -> tuple[str, ...]:
        """Return the contributors, after checking that the sender may send for them."""
        site, names = self._sites[member], tuple(head.contributors)
        if len(site) == 1:
            names = names or site
        if len(set(names)) != len(names) or not set(names) <= set(site):
            raise WireError(
                f"{member} sends values of members outside its site",
                given=", ".join(names), expected=f"only {', '.join(site)}",
            )  # fmt: skip
        if head.weight > 0 and not names:
            raise WireError(
                f"{member} does not name the contributors",
                given=f"weight {head.weight:g}", expected=f"some of {', '.join(site)}",
            )  # fmt: skip
        return names

    def drop(self, member: str) -> None:
        """Stop waiting for a lost member; a complete contribution stays in."""
        self._waited_for.discard(member)
        part = self._parts.get(member)
        if part is not None and not part.complete:
            del self._parts[member]

    def refuse(self, member: str) -> None:
        """Stop waiting for a member and discard its contribution."""
        self._waited_for.discard(member)
        self._parts.pop(member, None)

    def have(self, member: str) -> list[int]:
        """Return the indices of the pieces that arrived from a member."""
        part = self._parts.get(member)
        return sorted(part.have) if part else []

    @property
    def missing(self) -> tuple[str, ...]:
        """Live members without a complete contribution."""
        return tuple(
            member
            for member in self.members
            if member in self._waited_for
            and not (member in self._parts and self._parts[member].complete)
        )

    def shares(self) -> list[Share]:
        """Return the complete contributions in member order."""
        return [
            Share(
                member,
                Packet(part.data, part.codec, part.sizes),
                part.weight,
                part.contributors,
                aggregation=part.aggregation,
            )
            for member in self.members
            if (part := self._parts.get(member)) is not None and part.complete
        ]

    def together(self) -> tuple[Contribution, ...]:
        """Return every member's contribution in member order; empty if one is not there."""
        found = tuple(self._parts[member] for member in self.members if member in self._parts)
        return found if len(found) == len(self.members) else ()

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest contribution; compatible contributions are equally large."""
        return max((part.total_bytes for part in self._parts.values()), default=0)

    def started(self, member: str) -> bool:
        """Return whether any piece of a member's contribution is held."""
        return member in self._parts

    def held(self) -> dict[str, int]:
        """Return the bytes held of every member; may be called from any thread."""
        return {member: part.total_bytes for member, part in list(self._parts.items())}
