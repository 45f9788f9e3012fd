"""The members of a SWARM job that hold the whole model, seen from its stages.

They serve no stage, and meet the members of all. One that was late for the last round takes over
what the stages saved at their end, measures it and reports it: the job does not end without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atoll.hub.jobs.jobs import Jobs
from atoll.hub.rounds.checkpoints import Checkpoints
from atoll.ids import slot_of
from atoll.swarm.ledger import Ledger
from atoll.wire.states import MemberState
from atoll.wire.swarm import SwarmPlace


@dataclass(frozen=True, slots=True)
class WholeMembers:
    """See the module's docstring."""

    jobs: Jobs
    checkpoints: Checkpoints
    live: Callable[[str], list[str]]
    """Returns the members of a job whose processes were launched and did not end."""

    def of(self, job: str) -> list[str]:
        """Return the members, launched and not ended, that hold the whole model."""
        whole = self._count(job)
        return [member for member in self.live(job) if slot_of(member) < whole] if whole else []

    def stages_over(self, job: str, ledger: Ledger | None) -> bool:
        """Return whether the stages have done their last step.

        After a restart of the hub that only shows in the states of their members.
        """
        if ledger is not None and ledger.finished:
            return True
        record, whole = self.jobs.find(job), self._count(job)
        members = record.members.values() if record is not None else ()
        stages = [member for member in members if member.slot >= whole]
        done = any(member.state == MemberState.DONE for member in stages)
        return done and not any(member.live for member in stages)

    async def place(self, job: str, ledger: Ledger, stage: int) -> SwarmPlace:
        """Name the members of a stage, which have its state, or the last step if that is over."""
        if self.stages_over(job, ledger) and not ledger.finished:  # a ledger from before a restart
            newest = await self.checkpoints.newest(job)
            return SwarmPlace(0, stage, newest.round, finished=True)
        donors = [member.holder.member for member in ledger.serving(stage)]
        saved = ledger.saves.saved == ledger.step
        step = ledger.step if saved or not ledger.finished else -1
        return SwarmPlace(0, stage, step, donors=donors, finished=ledger.finished)

    def _count(self, job: str) -> int:
        record = self.jobs.find(job)
        return record.spec.swarm.whole if record is not None else 0
