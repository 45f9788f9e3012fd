"""The evaluation of the present state on held-out data: which microbatches it has and lacks.

They follow those of the step: first the microbatches of an evaluation in between, then those of the
one at the end, which is of all held-out data. No stage counts a gradient of them, so a lost member
takes nothing along: what was measured stays. After a restart of the hub all is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from atoll.swarm.saves import Saves
from atoll.wire.swarm import HeldOutSum, SwarmDone


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A complete evaluation."""

    step: int
    history: int
    member: str
    """Member of the last stage that measured the last of it."""
    total: HeldOutSum
    last: bool
    """Of all held-out data, at the end of the job."""


@dataclass
class Evaluations:
    """See the module's docstring."""

    first: int
    """Microbatches of a step: the index of the first one of an evaluation."""
    saves: Saves
    """Knows when the job ends."""
    sizes: tuple[int, int] = (0, 0)
    """Microbatches of an evaluation in between, and at the end, as members reported."""
    due: bool = False
    """The present state is evaluated; at the planned end of the job it is in any case."""
    counted: dict[int, HeldOutSum] = field(default_factory=dict)
    found: list[Evaluated] = field(default_factory=list)
    """Complete and not stored yet; the job is not over before."""

    def announced(self, sizes: Sequence[int]) -> None:
        """A member has announced the numbers of microbatches; they are the same for all members."""
        if len(sizes) == 2:
            self.sizes = sizes[0], sizes[1]

    def begin(self) -> None:
        """The state is another one."""
        self.due, self.counted = False, {}

    def indices(self, step: int) -> range:
        """Return all indices of the evaluation of this state; none if the job was stopped here."""
        (between, end), ends = self.sizes, self.saves.ends(step)
        start = self.first + (between if ends else 0)
        if ends:
            return range(start, start + (0 if self.saves.stopping else end))
        return range(start, start + (between if self.due else 0))

    def lacking(self, step: int) -> dict[int, list[int]]:
        """Return the indices that are not counted, each without a stage."""
        return {index: [] for index in self.indices(step) if index not in self.counted}

    def complete(self, step: int) -> bool:
        """Return whether nothing is lacking."""
        return len(self.counted) >= len(self.indices(step))

    def over(self, step: int) -> bool:
        """Return whether nothing is lacking, and all that was found is stored."""
        return self.complete(step) and not self.found

    def measured(self, body: SwarmDone, *, history: int) -> None:
        """Count a microbatch, once, wherever its member is by now."""
        wanted = body.index in self.indices(body.step) and body.index not in self.counted
        if body.held_out is None or not wanted:
            return
        self.counted[body.index] = body.held_out
        if self.complete(body.step):
            member = next((holder.member for holder in body.holders), "")
            ends = self.saves.ends(body.step)
            self.found.append(Evaluated(body.step, history, member, self._total(), ends))

    def _total(self) -> HeldOutSum:
        """Return the sum of what is counted, independent of who measured it and in which order."""
        found = [self.counted[index] for index in sorted(self.counted)]
        classified = bool(found) and all(each.correct >= 0 for each in found)
        return HeldOutSum(
            math.fsum(each.loss_sum for each in found),
            sum(each.targets for each in found),
            sum(each.correct for each in found) if classified else -1,
        )
