"""Build what a member of a SWARM trains from its job: the stage, its optimizer, and the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from atoll.checkpoint import Part
from atoll.checkpoint.format.part import STATE
from atoll.checkpoint.format.pieces import ShardedInfo
from atoll.checkpoint.neighbours import fill_from_neighbours
from atoll.checkpoint.stages import OLDER_PREFIX, load_stage, stage_part
from atoll.checkpoint.state.sharded_state import Trained as StageState
from atoll.config import JobSpec
from atoll.config.swarm_tables import SYNC
from atoll.data import Dataset, Deal, TrainingData
from atoll.data.microbatches import HeldOutMicrobatches, Microbatches
from atoll.errors import CheckpointError, CheckpointMissing, ConfigError, LossNotFinite
from atoll.strategies.inner.options import confined_to
from atoll.strategies.inner.pipeline.lookahead import check_lookahead
from atoll.strategies.inner.pipeline.stages import chain_of
from atoll.strategies.inner.swarm.runner import StageRunner
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.task import Task
from atoll.train.build import Intervals, about_model, dealt, load_data
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from atoll.train.partly import stage_model
from atoll.train.swarm.outer import StageOuter
from atoll.train.swarm.states import StageStates
from atoll.wire.manifest import ABOUT, HISTORY
from atoll.wire.swarm import SwarmPlace

CPU = torch.device("cpu")


STEP, STAGE, ROUND, AGREES = "step", "stage", "round", "agrees"
"""Keys in the metadata of a state."""

OuterOf = Callable[[Task, ModelStage], StageOuter]
"""Returns the outer method of a stage, for its task."""


class TrainedStage:
    """A stage with its optimizer and schedule; its state can be read by other threads.

    Gradients are clipped by the norm over this stage's parameters: the norm over all stages would
    take another exchange in every step. A stage whose share of the norm is small is clipped less.
    """

    def __init__(
        self, spec: JobSpec, stage: ModelStage, *, member: str, outer: OuterOf | None = None,
        tokens: int = 1,
    ) -> None:  # fmt: skip
        """Take over a stage with its initial weights; a row has so many `tokens`.

        With `outer` each member steps its own optimizer, and `outer` combines their parameters.
        """
        self.runner = StageRunner(stage, seed=spec.job.seed, early=spec.swarm.early_microbatches)
        self.optimizer = build_optimizer(stage.module, spec.train, hidden=stage.hidden)
        if self.runner.early:
            check_lookahead(self.optimizer, instead=SYNC)
        schedule = StepSchedule(self.optimizer, learning_rate(spec.train))
        self.task = Task(
            stage.module, self.optimizer, schedule, member=member, last=spec.train.steps
        )
        self._clip, self._tokens = spec.train.clip, tokens
        self.outer = outer(self.task, stage) if outer is not None else None
        self.identical = outer is None
        """Whether all members of a stage hold the same bits, as `StateOf` says it."""
        self._unsettled = False
        """It has stepped, and not yet met the others."""
        self._agrees = True
        """All members of the stage have this state: they met after its last step."""
        steps, elements = spec.train.steps, self.task.num_parameters
        plan = self.outer.traffic(elements, 2, steps=steps) if self.outer is not None else None
        self._evaluated_every = Intervals.of(spec, plan.rounds if plan else steps).evaluate

    def state(self) -> StageState:
        """Return model and optimizer by their names in the whole model, to fill them."""
        return StageState(self.runner.stage, self.optimizer)

    @property
    def round(self) -> int:
        """Steps that it contains with all that belongs to them: the version of the state."""
        return self.task.step - self._unsettled

    @property
    def base(self) -> str:
        """Name of the state, without its step."""
        return f"stage {self.runner.stage.number}"

    def part(self, texts: Mapping[str, str] | None = None) -> Part:
        """Return its state as of the beginning of this step; the tensors are not copied.

        Read it on the member's own thread, or inside `task.state_lock.still`.
        """
        number = self.runner.stage.number
        state = StageState(_Steady(self.runner), self.optimizer)
        own = {STEP: str(self.round), STAGE: str(number), ROUND: str(self.task.round)}
        own |= {AGREES: "yes"} if self._agrees else {}
        more = self.outer.tensors() if self.outer is not None else {}
        more |= {OLDER_PREFIX + name: t for name, t in self.runner.older().items()}
        return stage_part(state, number, texts={**own, **(texts or {})}, more=more)

    def parts(self) -> tuple[Part, Part]:
        """Return its state for donors; members of a stage have nothing of their own."""
        return self.part(), Part("inner", {})

    def names(self) -> set[str]:
        """Return the names of what it takes out of the files of a checkpoint."""
        return set(self.state().model_tensors())

    def take_over(self, parts: Iterable[Part], *, step: int, round_: int) -> None:
        """Fill it with a state of this step, after so many rounds of the stage's members.

        Raises:
            CheckpointError: the state does not fit.
        """
        with self.task.state_lock.moving():
            kept = list(parts)
            load_stage(self.state(), kept)
            self.runner.stage.constrain()  # other blocks are free if it had other stages
            self._go_to(step, round_)
            self._agrees = self.outer is None or any(AGREES in part.metadata for part in kept)
            older = {n: t for part in kept for n, t in part.tensors.items()}
            start = len(OLDER_PREFIX)
            self.runner.load_older(
                {n[start:]: t for n, t in older.items() if n.startswith(OLDER_PREFIX)}
            )
            if self.outer is not None:
                self.outer.load({n: t for part in kept for n, t in part.tensors.items()})

    def rebuild(self, neighbours: Sequence[Part], *, step: int, round_: int) -> None:
        """Fill it with the mean of its neighbours' parameters, and start the optimizer anew.

        Raises:
            NeighboursDiffer: their layers do not fit.
        """
        with self.task.state_lock.moving():
            fill_from_neighbours(
                self.state().model_tensors(), [part.tensors for part in neighbours]
            )
            self.runner.stage.constrain()
            self._go_to(step, round_)
            self._agrees = self.outer is None
            if self.outer is not None:
                self.outer.load({})

    def _go_to(self, step: int, round_: int) -> None:
        self.task.step, self.task.round = step, round_
        self.task.free_period()
        if self.task.scheduler is not None:
            self.task.scheduler.load_state_dict({"step": step})
        self.runner.begin(step)

    def update(self, mean: Tensor | None, *, rows: int) -> None:
        """Step the optimizer with a mean of the runner's gradients, and begin the next step.

        None: this member has no row of the step, and steps by itself: only the schedule goes on.

        Raises:
            LossNotFinite: a gradient is not finite; nothing was updated.
        """
        with self.task.state_lock.moving():
            self.runner.keep()
            if mean is not None:
                self._step(mean)
            self.task.tokens += rows * self._tokens
            self.task.advance()
            self._unsettled = self.outer is not None
            self._agrees = self.outer is None
            self.runner.go_on()

    def meet(self, *, last: bool = False) -> None:
        """Meet the other members of the stage if their outer method has a round now.

        After the `last` step it has one if steps are left since the round before.

        Raises:
            LeftBehind: the others went on without this member.
            GroupLeft: this member leaves.
        """
        if self.outer is not None:
            with self.task.state_lock.moving():
                met = self.outer.meet()
                if last:
                    met = self.outer.finish() or met
                if met:
                    self._agrees = True
                    self.runner.stage.constrain()  # the codec's error is not in the subspace
                    self.runner.begin(self.task.step)  # with new buffers
                self._unsettled = False

    @property
    def evaluates(self) -> bool:
        """Whether the state of now is to be evaluated: rounds are counted as in every job."""
        rounds = self.task.round if self.outer is not None else self.task.step
        return self._agrees and rounds % self._evaluated_every == 0

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Surround an evaluation: the parameters are those on which the stage agrees."""
        agreed = self.outer.evaluating() if self.outer is not None else nullcontext()
        if isinstance(agreed, nullcontext):  # they are there already
            yield
            return
        with ExitStack() as stack:
            with self.task.state_lock.moving():  # others may read the state inside
                stack.enter_context(agreed)
            yield
            with self.task.state_lock.moving():
                stack.close()

    def _step(self, mean: Tensor) -> None:
        stage = self.runner.stage
        self.runner.apply(mean)
        stage.constrain_gradients()
        gradients = [p.grad for p in self.task.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if not math.isfinite(norm.item()):
            raise LossNotFinite(
                "the gradient of a stage is not finite; the update was refused",
                given=f"stage {stage.number}, step {self.task.step + 1}",
                expected="finite numbers", remedy="lower the learning rate, or set clip",
            )  # fmt: skip
        if self._clip:
            nn.utils.clip_grads_with_norm_(self.task.parameters(), self._clip, norm)
        with stage.stepping():
            self.optimizer.step()


class _Steady:
    """A stage whose buffers are those of the beginning of the step, see `ShardedState`."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._runner.stage.parameters()

    def buffers(self) -> Mapping[str, Tensor]:
        return self._runner.steady_buffers()


class JobStages:
    """Builds the stages of a job; see `Stages` in `parts.py`."""

    def __init__(
        self, spec: JobSpec, cut: StageCut, *, member: str, device: torch.device = CPU,
        states: StageStates | None = None, outer: OuterOf | None = None,
    ) -> None:  # fmt: skip
        """Build nothing yet; without `states` there are only those of the start.

        With `outer` each member of a stage steps its own optimizer, and it combines parameters.
        """
        self._outer = outer
        self._spec, self._cut = spec, replace(cut, size=confined_to(spec))
        self._member, self._device = member, device
        self._states = states
        self._dataset: TrainingData | None = None
        self._deal: Deal | None = None
        self._held_out: HeldOutMicrobatches | None = None
        self._about: Mapping[str, str] = {}
        self._trained: TrainedStage | None = None

    def take(self, place: SwarmPlace) -> TrainedStage:
        """Return the place's stage: of its members, of the start, or of a checkpoint.

        Raises:
            ConfigError: the model cannot be cut like that.
            CheckpointError: there is no checkpoint of that step, or no state fits.
            GroupError: its members have stepped on; ask for a place again.
        """
        model = stage_model(self._spec, self._data(), place.stage, self._cut).model
        if self._deal is None:
            self._deal, held_out = dealt(
                self._spec, self._data(), model, slots=self._spec.swarm.whole + 1
            )
            train, count = self._spec.train, self._spec.swarm.microbatches
            self._held_out = HeldOutMicrobatches(
                held_out, rows=max(1, train.batch // count), limit_tokens=train.eval_tokens
            )
            self._about = about_model(self._spec, self._data(), model)
        # A row of data shows whether a guess at the order of a model's layers is right.
        row = None if chain_of(model)[1] else self.rows(self._spec.train.batch)(0, 0)[0]
        own = ModelStage(model, place.stage, self._cut, device=self._device, sample=row)
        del model
        trained = TrainedStage(
            self._spec, own, member=self._member, outer=self._outer, tokens=self.tokens_of_a_row
        )
        states = self._states
        if states is None and place.step > 0:
            raise CheckpointMissing("there are only the weights of the start", given=place.step)
        if states is not None and place.donors:
            part = states.donated(place)
            stage_and_step = part.metadata.get(STAGE), part.metadata.get(STEP)
            if stage_and_step != (str(place.stage), str(place.step)):
                raise CheckpointError(
                    "a donor gave another state than that of the place",
                    given=f"stage {stage_and_step[0]}, step {stage_and_step[1]}",
                    expected=f"stage {place.stage}, step {place.step}",
                )
            round_ = int(part.metadata.get(ROUND, place.round))
            trained.take_over([part], step=place.step, round_=round_)
        elif states is not None and place.neighbours:
            beside = place.stage - 1, place.stage + 1
            near = [
                states.donated(msgspec.structs.replace(place, stage=stage, donors=members))
                for stage, members in zip(beside, place.neighbours, strict=True)
            ]
            trained.rebuild(near, step=place.step, round_=place.round)
        elif states is not None and place.step > 0:
            parts = states.saved(place.step, trained.names(), stage=place.stage)
            trained.take_over(parts, step=place.step, round_=place.round)
        if states is not None:
            states.offer(trained, trained.task.state_lock.still)
        self._trained = trained
        return trained

    def save(self, *, history: int, final: bool, failed: Callable[[], None]) -> None:
        """Save the file of the taken stage for a checkpoint; see `Stages`."""
        trained = self._trained
        if self._states is None or trained is None:
            failed()
            return
        about = ShardedInfo(step=trained.round, texts=dict(self._about))
        texts = {HISTORY: str(history), STATE: str(history)}
        if trained.runner.stage.first:
            texts[ABOUT] = msgspec.json.encode(about).decode()
        self._states.save(trained.part(texts), step=trained.round, final=final, failed=failed)

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
            if self._deal is None or self._held_out is None:
                raise RuntimeError("take a stage first")
            if index >= microbatches:
                return self._held_out(index - microbatches)
            if not made:
                size, slot = batch // microbatches, self._spec.swarm.whole
                made.append(Microbatches(self._deal, rows=size, count=microbatches, slot=slot))
            return made[0](step, index)

        return rows

    @property
    def held_out(self) -> Sequence[int]:
        """See `Stages`; members with the whole model, if there are any, evaluate it alone.

        They are faster, and a round waits a bounded time only for stages that evaluate before it.
        """
        if self._held_out is None or self._spec.swarm.whole:
            return ()
        return self._held_out.sizes

    @property
    def tokens_of_a_row(self) -> int:
        """Targets of one sample; call it once a stage was taken."""
        if self._deal is None:
            raise RuntimeError("take a stage first")
        return self._deal.batch(0, np.zeros(1, dtype=np.int64))[1].numel()

    @property
    def data_digest(self) -> str:
        """Digest of the data, equal on all members of a job."""
        return self._data().digest

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text per held-out token; None: the data is no text."""
        data = self._data()
        return data.held_out.bytes_per_token if isinstance(data, Dataset) else None

    def _data(self) -> TrainingData:
        if self._dataset is None:
            self._dataset = load_data(self._spec)
        return self._dataset
