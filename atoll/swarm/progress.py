"""How far the job is: the present step, what is counted, evaluated and saved of it."""

from __future__ import annotations

from atoll.swarm.counts import StageCount, StepCounts
from atoll.swarm.evaluations import Evaluations
from atoll.swarm.places import SwarmSettings
from atoll.swarm.saves import Saves
from atoll.swarm.table import MemberTable


class Progress(MemberTable):
    """The members, and the counts of the steps."""

    def __init__(self, settings: SwarmSettings, saves: Saves) -> None:
        """Begin with step 0."""
        super().__init__(settings)
        self.saves = saves
        self.evaluations = Evaluations(settings.microbatches, saves)
        self.steps = StepCounts(settings.stages, settings.microbatches, settings.early)

    @property
    def step(self) -> int:
        """The present step."""
        return self.steps.step

    @property
    def counts(self) -> list[StageCount]:
        """The counts of the present step, by stage."""
        return self.steps.now

    def required(self, stage: int) -> set[str]:
        """Return the members without which the round of a closed stage would lose a share."""
        return self.counts[stage].holders()

    @property
    def finished(self) -> bool:
        """Whether the last step is done, and evaluated and saved if that was possible."""
        return self.saves.over(self.step) and self.evaluations.over(self.step)

    def paused(self) -> str:
        """Return why nothing is leased, or an empty text; a finished job waits for no member."""
        return "" if self.finished else super().paused()

    def savers(self) -> list[str]:
        """Return the members that save the state of the present step, by stage."""
        stages = range(self.settings.stages)
        serving = [[member.holder.member for member in self.serving(stage)] for stage in stages]
        return self.saves.savers(self.step, serving)
