"""Which members save a checkpoint of a step, and when a SWARM has nothing left to do.

One ready member per stage saves; all stages save the same step, because the ledger names them. A
saver that is lost, or fails, is replaced as long as the job is at that step: all members of a stage
have its state. Otherwise the checkpoint stays incomplete, and is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NAMED_KEPT = 100
"""Steps whose savers are remembered: an upload may end many steps later."""


@dataclass
class Saves:
    """See the module's docstring."""

    every: int = 0
    """Steps between two checkpoints; 0: none but the last."""
    last: int = -1
    """Step at which the job ends, whose state is saved; -1: unknown, nothing is."""
    saved: int = 0
    """Step of the newest checkpoint, or of the start: the state that members can go back to. -1:
    it was not looked up yet."""
    history: int = 0
    """History of that state, see `SwarmPlace`."""
    _step: int = -1
    _savers: dict[int, str] = field(default_factory=dict)
    _named: dict[int, set[tuple[int, str]]] = field(default_factory=dict)
    """Stages and their savers, of the newest steps."""
    _failed: set[str] = field(default_factory=set)
    """Members that could not save this step."""
    stopping: bool = False
    _skipped: bool = False
    """No member of some stage can save this step."""

    def due(self, step: int) -> bool:
        """Return whether the state of a step is to be saved and is not yet."""
        wanted = step == self.last or (self.every > 0 and step % self.every == 0)
        return 0 < step <= self.last and wanted and step > self.saved

    def savers(self, step: int, serving: Sequence[Sequence[str]]) -> list[str]:
        """Return the saver of each stage; empty: nothing is to be saved.

        `serving` are the members of each stage that have its state at this step.
        """
        if step != self._step:
            self._step, self._failed, self._skipped = step, set(), False
        there = [[m for m in members if m not in self._failed] for members in serving]
        if not self.due(step) or self._skipped:
            return []
        if not all(there):
            failed = any(all_ and not left for all_, left in zip(serving, there, strict=True))
            self._skipped = failed or (self.stopping and not all(serving))
            return []
        for stage, members in enumerate(there):
            if self._savers.get(stage) not in members:  # the one before has the memory for it
                self._savers[stage] = members[0]
            self._named.setdefault(step, set()).add((stage, self._savers[stage]))
        while len(self._named) > NAMED_KEPT:
            del self._named[next(iter(self._named))]
        return [self._savers[stage] for stage in range(len(there))]

    def named(self, member: str, step: int, stage: int) -> bool:
        """Return whether a member was to save this state of a stage, now or earlier."""
        return (stage, member) in self._named.get(step, ())

    def complete(self, step: int, history: int) -> None:
        """A checkpoint of this step is complete."""
        if step > self.saved:
            self.saved, self.history = step, history

    def stop(self, step: int) -> None:
        """The job was asked to stop, and ends at this step."""
        self.last, self.stopping = step, True

    def failed(self, member: str, step: int) -> None:
        """A saver could not save this step."""
        if step == self._step:
            self._failed.add(member)

    def ends(self, step: int) -> bool:
        """Return whether this is the last step, after which nothing is trained."""
        return 0 <= self.last <= step

    def over(self, step: int) -> bool:
        """Return whether the job is at its last step, and that is saved or cannot be."""
        return self.ends(step) and (self.saved >= self.last or self._skipped)
