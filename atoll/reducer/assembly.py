"""Putting pieces together: what has arrived of every member's contribution to one epoch.

Pure and bounded: a contribution may be as large as its codec's formula says and no larger, and
only members of the plan may send. Pieces may come in any order and more than once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.codec.base import Packet
from atoll.codec.registry import make_codec
from atoll.errors import WireError
from atoll.reducer.mean import Share, bad_weight, is_weight
from atoll.wire.chunks import ALL_TO_ALL, ChunkHead, count_pieces
from atoll.wire.limits import CHUNK_BYTES

MAX_CONTRIBUTION_BYTES = 16 * 2**30
"""Largest encoded vector of one member that a reducer takes."""


def expected_bytes(codec: str, elements: int) -> int:
    """Return the size of an encoded vector.

    Raises:
        ConfigError: no codec has that name.
    """
    return make_codec(codec).nbytes(elements)


@dataclass(slots=True)
class Contribution:
    """The encoded vector of one member, as far as it has arrived."""

    codec: str
    sizes: tuple[int, ...]
    weight: float
    total_bytes: int
    contributors: tuple[str, ...]
    """Whose values are in it."""
    policy: str
    """What is to be done with the contributions beyond averaging them."""
    data: bytearray
    have: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether every piece is here."""
        return len(self.have) == count_pieces(self.total_bytes)

    def put(self, head: ChunkHead, piece: memoryview) -> None:
        """Store one piece; a repeated one changes nothing.

        Raises:
            WireError: the piece belongs to another packet than the first one did.
        """
        facts = (
            head.codec, tuple(head.sizes), head.weight, head.total_bytes, head.count,
            tuple(head.contributors) or self.contributors, head.policy,
        )  # fmt: skip
        own = (
            self.codec, self.sizes, self.weight, self.total_bytes, count_pieces(self.total_bytes),
            self.contributors, self.policy,
        )  # fmt: skip
        if facts != own:
            raise WireError(
                "pieces of one packet contradict each other", given=str(facts), expected=str(own)
            )
        if head.index not in self.have:
            start = head.index * CHUNK_BYTES
            self.data[start : start + len(piece)] = piece
            self.have.add(head.index)


class Assembly:
    """The contributions to one epoch; complete when no live member's is missing."""

    def __init__(
        self,
        members: Sequence[str],
        *,
        sites: Mapping[str, Sequence[str]] | None = None,
        max_bytes: int = MAX_CONTRIBUTION_BYTES,
        size_of: Callable[[str, int], int] = expected_bytes,
    ) -> None:
        """Expect one contribution from each member.

        Args:
            members: Who sends, in the order of the sum.
            sites: Sender -> the members that it speaks for; without one: only itself.
            max_bytes: Largest contribution taken from one member.
            size_of: Encoded size from codec spec and number of elements.
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
            WireError: the sender is not in the plan, or speaks for others, or the packet is not as
                large as its codec and sizes say, or its pieces contradict each other.
            GroupError: its weight cannot be used.
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
        """Return the empty contribution that a first piece announces."""
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
            total_bytes=expected, contributors=self._names(member, head), policy=head.policy,
            data=bytearray(expected),
        )  # fmt: skip

    def _names(self, member: str, head: ChunkHead) -> tuple[str, ...]:
        """Return whose values are in a contribution."""
        site, names = self._sites[member], tuple(head.contributors)
        if len(site) == 1:
            names = names or site
        if len(set(names)) != len(names) or not set(names) <= set(site):
            raise WireError(
                f"{member} speaks for members that are not of its site",
                given=", ".join(names), expected=f"only {', '.join(site)}",
            )  # fmt: skip
        if head.weight > 0 and not names:
            raise WireError(
                f"{member} does not say whose values it sends",
                given=f"weight {head.weight:g}", expected=f"some of {', '.join(site)}",
            )  # fmt: skip
        return names

    def drop(self, member: str) -> None:
        """Wait for a lost member no more; what it sent completely stays in."""
        self._waited_for.discard(member)
        part = self._parts.get(member)
        if part is not None and not part.complete:
            del self._parts[member]

    def refuse(self, member: str) -> None:
        """Wait for a member no more and forget whatever it sent."""
        self._waited_for.discard(member)
        self._parts.pop(member, None)

    def have(self, member: str) -> list[int]:
        """Return the indices of the pieces that arrived from a member."""
        part = self._parts.get(member)
        return sorted(part.have) if part else []

    @property
    def missing(self) -> tuple[str, ...]:
        """Members that are waited for and are not complete."""
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
                policy=part.policy,
            )
            for member in self.members
            if (part := self._parts.get(member)) is not None and part.complete
        ]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest contribution; those that fit each other are equally large."""
        return max((part.total_bytes for part in self._parts.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.total_bytes for part in self._parts.values())
