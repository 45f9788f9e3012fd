"""The digests of the committed state that members have reported, with their counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from atoll.rounds.checks import majority_base


class Bases(Mapping[str, str]):
    """Member -> digest, with counts: every member that recovers asks for the majority."""

    def __init__(self) -> None:
        """Begin with none."""
        self._digests: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, digests: Mapping[str, str]) -> Bases:
        """Return these digests."""
        found = cls()
        for member, digest in digests.items():
            found.put(member, digest)
        return found

    def __getitem__(self, member: str) -> str:
        return self._digests[member]

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)

    def put(self, member: str, digest: str) -> None:
        """Record a member's digest, instead of its earlier one."""
        self.forget(member)
        self._digests[member] = digest
        self._counts[digest] += 1

    def forget(self, member: str) -> None:
        """Remove a member's digest, if there is one."""
        digest = self._digests.pop(member, None)
        if digest is not None:
            self._counts[digest] -= 1
            if not self._counts[digest]:
                del self._counts[digest]

    def majority_without(self, member: str) -> str:
        """Return the digest of most other members, of the lowest slot in a tie; empty: of none."""
        counts = dict(self._counts)
        own = self._digests.get(member)
        if own is not None:
            counts[own] -= 1
        most = max(counts.values(), default=0)
        if most <= 0:
            return ""
        usual = [digest for digest, count in counts.items() if count == most]
        if len(usual) == 1:
            return usual[0]
        return majority_base({m: d for m, d in self._digests.items() if m != member})
