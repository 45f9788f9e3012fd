"""What of one step is counted for one stage, and by which members."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.wire.swarm import Holder, Share


@dataclass
class StageCount:
    """The shares of one stage in one step.

    Invariant: `counted` has at most one holder per index, and all of them live. While members in
    `agreed_by` hold the mean, nothing is lacking, whoever contributed to it.
    """

    log: list[Share] = field(default_factory=list)
    """Every share in the order of counting; a later one of an index replaces the earlier."""
    counted: dict[int, tuple[Holder, int]] = field(default_factory=dict)
    """Holder and lease of each index."""
    closing: int = 0
    """Above 0: every index is counted; a new number with every closing."""
    agreed_by: set[Holder] = field(default_factory=set)
    """Members that hold the mean of the stage's sums."""

    def count(self, index: int, lease: int, holder: Holder) -> bool:
        """Count a microbatch if it is not yet counted; return whether it now is, by this holder."""
        if index in self.counted or self.agreed_by:
            return False
        self.counted[index] = holder, lease
        self.log.append(Share(index, lease, holder.member))
        return True

    def holders(self) -> set[str]:
        """Return the members with shares."""
        return {holder.member for holder, _ in self.counted.values()}

    def lose(self, holder: Holder) -> None:
        """Uncount what a lost member held, unless others hold the mean that contains it."""
        kept = {i: entry for i, entry in self.counted.items() if entry[0] != holder}
        changed = len(kept) < len(self.counted) or holder in self.agreed_by
        self.counted = kept
        self.agreed_by.discard(holder)
        if changed and not self.agreed_by:
            self.closing = 0
