"""Build what a member of a SWARM trains from its job: the stage, its optimizer, and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from atoll.checkpoint.sharded import Trained as StageState
from atoll.checkpoint.sharded import load_sharded
from atoll.config import JobSpec
from atoll.data import Dataset, Deal, ImageDataset
from atoll.data.microbatches import Microbatches
from atoll.errors import CheckpointMissing, ConfigError, LossNotFinite
from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.task import Task
from atoll.train.build import dealt, load_data, whole_model
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate

CPU = torch.device("cpu")


class TrainedStage:
    """A stage with its optimizer and schedule.

    Gradients are clipped by the norm over this stage's parameters: the norm over all stages would
    take another exchange in every step. A stage whose share of the norm is small is clipped less.
    """

    def __init__(self, spec: JobSpec, stage: ModelStage, *, member: str) -> None:
        """Take over a stage with its initial weights."""
        self.runner = StageRunner(stage, seed=spec.job.seed)
        self.optimizer = build_optimizer(stage.module, spec.train)
        schedule = StepSchedule(self.optimizer, learning_rate(spec.train))
        self.task = Task(
            stage.module, self.optimizer, schedule, member=member, last=spec.train.steps
        )
        self._clip = spec.train.clip

    def state(self) -> StageState:
        """Return model and optimizer by their names in the whole model, for checkpoints."""
        return StageState(self.runner.stage, self.optimizer)

    def go_to(self, step: int) -> None:
        """Set the schedule to a step, after a state was loaded."""
        self.task.step = step
        self.task.free_period()
        if self.task.scheduler is not None:
            self.task.scheduler.load_state_dict({"step": step})

    def update(self) -> None:
        """Step the optimizer with the gradients in `grad`.

        Raises:
            LossNotFinite: a gradient is not finite; nothing was updated.
        """
        gradients = [p.grad for p in self.task.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not math.isfinite(norm.item()):
            raise LossNotFinite(
                "the gradient of a stage is not finite; the update was refused",
                given=f"stage {self.runner.stage.number}, step {self.task.step + 1}",
                expected="finite numbers", remedy="lower the learning rate, or set clip",
            )  # fmt: skip
        if self._clip:
            nn.utils.clip_grads_with_norm_(self.task.parameters(), self._clip, norm)
        self.optimizer.step()
        self.task.advance()


class JobStages:
    """Builds the stages of a job; see `Stages` in `member.py`."""

    def __init__(
        self, spec: JobSpec, cut: StageCut, *, member: str, device: torch.device = CPU,
        saved: Callable[[], tuple[Path, int] | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Build nothing yet; `saved` returns folder and round of the newest checkpoint, if any."""
        self._spec, self._cut, self._member, self._device = spec, cut, member, device
        self._saved = saved
        self._dataset: Dataset | ImageDataset | None = None
        self._deal: Deal | None = None

    def take(self, stage: int, step: int, donors: Sequence[str]) -> TrainedStage:
        """Return a stage at `step`, of the start or of the newest checkpoint.

        Raises:
            ConfigError: the model cannot be cut like that.
            CheckpointMissing: there is no checkpoint of that step.
        """
        model = whole_model(self._spec, self._data())
        if self._deal is None:
            self._deal = dealt(self._spec, self._data(), model, slots=1)[0]
        own = ModelStage(model, stage, self._cut, device=self._device)
        trained = TrainedStage(self._spec, own, member=self._member)
        if step == 0:
            return trained
        found = self._saved()
        if found is None:
            raise CheckpointMissing("no checkpoint has the state of this stage", given=stage)
        about = load_sharded(*found, trained.state(), partly=True)
        if about.step != step:
            raise CheckpointMissing(
                "the newest checkpoint is of another step", given=about.step, expected=str(step)
            )
        trained.go_to(step)
        return trained

    def rows(self, microbatches: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
        """Return the job's microbatches: the batch of a step in so many parts.

        They can be called once a stage was taken: samples have the form that the model takes.

        Raises:
            ConfigError: the batch cannot be divided like that.
        """
        batch = self._spec.train.batch
        if not 0 < microbatches <= batch or batch % microbatches:
            raise ConfigError(
                "the batch cannot be cut into equal microbatches",
                given=f"batch = {batch}, {microbatches} microbatches",
                expected="a number of microbatches that divides the batch",
            )
        made: list[Microbatches] = []

        def rows(step: int, index: int) -> tuple[Tensor, Tensor]:
            if not made:
                if self._deal is None:
                    raise RuntimeError("take a stage first")
                made.append(
                    Microbatches(self._deal, rows=batch // microbatches, count=microbatches)
                )
            return made[0](step, index)

        return rows

    def _data(self) -> Dataset | ImageDataset:
        if self._dataset is None:
            self._dataset = load_data(self._spec)
        return self._dataset
