"""What of a step is counted, for each stage, and by which members."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.wire.swarm import Holder, Share


class Kept(NamedTuple):
    """A copy of a member's sum, as another member of the stage keeps it."""

    keeper: Holder
    number: int
    """The keeper's own number for it."""
    shares: frozenset[tuple[int, int]]
    """Index and lease of what the sum holds."""


@dataclass
class StageCount:
    """The shares of one stage in one step.

    Invariant: `counted` has at most one holder per index, and all of them live. While members in
    `agreed_by` hold the mean, nothing is lacking, no matter which members contributed.
    """

    log: list[Share] = field(default_factory=list)
    """Every share in the order of counting; a later one of an index replaces the earlier."""
    counted: dict[int, tuple[Holder, int]] = field(default_factory=dict)
    """Holder and lease of each index."""
    closing: int = 0
    """Above 0: every index is counted; a new number with every closing."""
    agreed_by: set[Holder] = field(default_factory=set)
    """Members that hold the mean of the stage's sums."""
    copies: dict[Holder, Kept] = field(default_factory=dict)
    """The newest copy of each member's sum; its keeper takes the shares over if the member is
    lost."""

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

    def keep(self, of: Holder, copy: Kept) -> bool:
        """Note a copy of a member's sum, unless its keeper has a newer one; return whether."""
        before = self.copies.get(of)
        if before is not None and before.keeper == copy.keeper and before.number > copy.number:
            return False  # it comes late: the keeper has dropped it
        self.copies[of] = copy
        return True

    def lose(self, holder: Holder) -> None:
        """Uncount what a lost member held, unless others hold the mean that contains it.

        What another member keeps a copy of is counted as that member's.
        """
        # If it comes back in this step it must not look for what it has dropped.
        self.log = [Share(s.index, s.lease) if s.member == holder.member else s for s in self.log]
        copy = self.copies.pop(holder, None)
        self.copies = {h: other for h, other in self.copies.items() if other.keeper != holder}
        held = {(i, lease) for i, (other, lease) in self.counted.items() if other == holder}
        if copy is not None and not self.agreed_by and copy.shares <= held:
            for index, lease in sorted(copy.shares):
                self.counted[index] = copy.keeper, lease
                self.log.append(Share(index, lease, copy.keeper.member, copy.number))
            if copy.shares:
                self.closing = 0  # its keeper has joined the round without them
        kept = {i: entry for i, entry in self.counted.items() if entry[0] != holder}
        changed = len(kept) < len(self.counted) or holder in self.agreed_by
        self.counted = kept
        self.agreed_by.discard(holder)
        if changed and not self.agreed_by:
            self.closing = 0


@dataclass
class StepCounts:
    """The counts of the present step, of the one before, and of the early part of the one after.

    The first `early` microbatches of a step are computed on the weights of the step before it, so
    they may be counted before that one is complete.
    """

    stages: int
    microbatches: int
    early: int
    step: int = 0
    now: list[StageCount] = field(default_factory=list)
    """By stage, as are the other two."""
    ahead: list[StageCount] = field(default_factory=list)
    before: list[StageCount] = field(default_factory=list)

    def begin(self, step: int) -> None:
        """Count a step from nothing."""
        self.step, self.before = step, self.now
        self.now, self.ahead = self._none(), self._none()

    def go_on(self) -> None:
        """The present step is complete: count the next one, of which a part may be counted."""
        self.step, self.before = self.step + 1, self.now
        self.now, self.ahead = self.ahead, self._none()

    def of(self, step: int, index: int) -> list[StageCount]:
        """Return the counts in which a microbatch belongs; none: it is not its time."""
        if step == self.step and 0 <= index < self.microbatches:
            return self.now
        return self.ahead if step == self.step + 1 and 0 <= index < self.early else []

    def log_from(self, step: int, stage: int, *, known: int, ahead: int) -> list[list[Share]]:
        """Return the shares of a stage after those known: of a step, and of the one after."""
        logs = (self.now, self.ahead) if step == self.step else (self.before, self.now)
        return [logs[0][stage].log[known:], logs[1][stage].log[ahead:]]

    def lose(self, holder: Holder) -> None:
        """Uncount what a lost member held."""
        for count in (*self.now, *self.ahead):
            count.lose(holder)

    def lacking(self, last: int) -> dict[tuple[int, int], list[int]]:
        """Return the stages that have not counted each (step, index), the present step first.

        Steps from `last` on, if that is not negative, are not computed.
        """
        found: dict[tuple[int, int], list[int]] = {}
        for counts, step, size in (
            (self.now, self.step, self.microbatches), (self.ahead, self.step + 1, self.early),
        ):  # fmt: skip
            if not 0 <= last <= step:
                open_by = lacking(counts, range(size))
                found |= {(step, index): stages for index, stages in open_by.items()}
        return found

    def _none(self) -> list[StageCount]:
        return [StageCount() for _ in range(self.stages)]


def lacking(counts: Sequence[StageCount], indices: Collection[int]) -> dict[int, list[int]]:
    """Return the stages that have not counted each index, without those that all have."""
    found = {
        index: [
            stage
            for stage, count in enumerate(counts)
            if not count.agreed_by and index not in count.counted
        ]
        for index in indices
    }
    return {index: stages for index, stages in found.items() if stages}
