"""A member that holds the whole model meets the members of every stage, stage by stage.

It is an ordinary trainer, whose outer method is that of the job once per stage: over the stage's
parameters, in the rounds of the stage's group. For the SWARM it is one more member of each stage,
and the SWARM is one more member for it, so they do the same number of steps between two rounds.

Rich sites as whole replicas beside poor ones grouped into pipelines: arXiv:2601.02360. Differs: a
pipeline need not be fixed, and any member of a stage may be lost in between.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from torch import Tensor, nn

from atoll.checkpoint import Part
from atoll.checkpoint.stages import load_stage
from atoll.checkpoint.state.sharded_state import Trained
from atoll.codec.base import Codec
from atoll.config import JobSpec
from atoll.errors import CheckpointError, ConfigError, GroupError, GroupLeft, LeftBehind, PeerLost
from atoll.group.base import Group
from atoll.strategies.base import Committed, SyncResult, Traffic
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.strategies.outer.base import OuterDefaults
from atoll.strategies.resolve import Resolved
from atoll.strategies.vectors.flat import Flat, digest
from atoll.task import Task
from atoll.train.join_job import JoinedJob
from atoll.train.swarm.build import ROUND, STEP
from atoll.train.swarm.outer import StageOuter
from atoll.train.swarm.states import JobStates, StageStates
from atoll.wire.swarm import SwarmAnnounce, SwarmPlace

log = logging.getLogger(__name__)

ASK_S = 60.0
"""Time limit of a question to the hub."""
PAUSE_S, LONG_S, SOON = 0.25, 2.0, 40
"""Pause before the states are requested again: the first `SOON` times, and later."""


class StagesOuter(OuterDefaults):
    """See the module's docstring, and :class:`~atoll.strategies.base.Outer`."""

    inherits = False
    """It takes over the states of stages by itself, see `setup`."""

    def __init__(
        self, resolved: Resolved, *, cut: StageCut, states: LateStages | None = None,
        late: bool = False,
    ) -> None:  # fmt: skip
        """Use the job's method; `states` brings those of a run that is under way (`late`)."""
        self._resolved, self._cut, self._states, self._late = resolved, cut, states, late
        self._stages: list[MetStage] = []
        self._over = -1

    @classmethod
    def of(
        cls, spec: JobSpec, joined: JoinedJob, *, should_stop: Callable[[], bool]
    ) -> StagesOuter:
        """Return the outer method of a job's member."""
        late = joined.connection.registered.committed_round > 0
        states = LateStages.of(joined, should_stop=should_stop) if late else None
        cut = StageCut(stages=spec.swarm.stages, cuts=tuple(spec.swarm.cuts))
        return cls(check_job(spec), cut=cut, states=states, late=late)

    def setup(self, task: Task, *, group: Group, codec: Codec) -> None:
        """Cut the model, whose parameters stay where they are; each stage has its own codec."""
        model = task.model
        device = next(model.parameters()).device
        self._flat = Flat.of(task)
        self._stages, self._over = [], -1
        for number in range(self._cut.stages):
            stage = ModelStage(model, number, self._cut, device=device)
            own = Task(
                stage.module, task.optimizer, member=task.member, last=task.last,
                state_lock=task.state_lock, group=number, paced=task.paced,
                elsewhere=None if task.elsewhere is None else _Beside(task),
            )  # fmt: skip
            outer = StageOuter(self._resolved, group=group, task=own, stage=stage)
            self._stages.append(MetStage(stage, own, outer))
        if self._late and self._states is not None:
            self._over = self._states.take_over(task, self._stages)
            task.push()
        self._plan(task)

    def begin(self, task: Task) -> SyncResult | None:
        """Do nothing: all start with the weights that follow from the seed."""
        return None

    def sync(self, task: Task) -> SyncResult | None:
        """Meet the members of each stage, one stage after the other, if a round is due."""
        return self._meet(task, last=False)

    def finish(self, task: Task) -> SyncResult | None:
        """Meet once more if steps are left since the last round."""
        return self._meet(task, last=True)

    def _meet(self, task: Task, *, last: bool) -> SyncResult | None:
        if self._over >= 0:  # what the stages have saved last is the model
            return self._ended(task)
        first = self._stages[0].task
        if task.step < first.period.start + first.period.length and not last:
            return None
        result: SyncResult | None = None
        try:
            for met in self._stages:
                own, outer = met.task, met.outer
                own.step, own.tokens, own.period = task.step, task.tokens, task.period
                result = (outer.finish() if last else outer.meet()) or result
                task.round = own.round
        except LeftBehind as error:
            if self._states is None:
                raise
            log.warning("%s: %s", task.member, error)
            self._over = self._states.take_over(task, self._stages)
            result = self._ended(task) if self._over >= 0 else None
        task.push()
        self._plan(task)
        return result

    def _plan(self, task: Task) -> None:
        """Plan the steps until the next rounds, at the pace of the first stage's rounds."""
        first = self._stages[0].task
        task.pace = first.pace
        task.begin_period(first.period.start + first.period.length)
        for met in self._stages:
            met.outer.begin_now()

    def _ended(self, task: Task) -> SyncResult:
        """End the run with the SWARM's last state: it had its last round without this member."""
        task.step = self._over
        for met in self._stages:
            met.outer.take_back()
        task.push()
        seconds = dict.fromkeys(("prepare", "join", "reduce", "commit", "apply"), 0.0)
        number = max(0, task.round - 1)
        return SyncResult(number, (task.member,), 0.0, seconds, stopping=True, committed=False)

    def digest(self, task: Task) -> str:
        """Return the digest of the parameters that this member carries."""
        return digest(self._flat.read())

    def committed(self, task: Task) -> Committed:
        """Return the present parameters."""
        return Committed(task.step, self.digest(task))

    def rejoin(self, task: Task) -> None:
        """Do nothing: each stage has taken over its own state."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Refuse: its state is that of the stages."""
        raise ConfigError("a member with the whole model has no state of its own")

    def traffic(self, elements: int, peers: int, *, steps: int, rank: int = 0) -> Traffic:
        """Return a member's traffic: over all stages it is that of the job's method."""
        return self._stages[0].outer.traffic(elements, peers, steps=steps, rank=rank)


class _Beside:
    """`Task.elsewhere` of a stage whose whole model the ranks of an island train.

    They get what rounds change once for all stages, from :class:`StagesOuter`.
    """

    vector = None

    def __init__(self, task: Task) -> None:
        self._task = task

    def pull(self) -> None:
        """Update the whole model, if the ranks have trained since."""
        self._task.pull()

    def push(self) -> None:
        """Do nothing: the whole model is pushed after the last stage."""

    def spoil(self) -> None:
        """Do nothing: nothing is lent."""


@dataclass(frozen=True, slots=True)
class MetStage:
    """A stage of the whole model, with whose members its holder meets."""

    stage: ModelStage
    task: Task
    """As the stage's outer method sees the member's training."""
    outer: StageOuter


@dataclass(frozen=True, slots=True)
class _Joined:
    """All stages together, see `ShardedState`."""

    stages: list[ModelStage]

    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {n: p for stage in self.stages for n, p in stage.parameters().items()}

    def buffers(self) -> Mapping[str, Tensor]:
        return {n: buffer for stage in self.stages for n, buffer in stage.buffers().items()}

    def untrained(self) -> Mapping[str, Tensor]:
        return {n: tensor for stage in self.stages for n, tensor in stage.untrained().items()}


class LateStages:
    """Brings what the members of each stage agreed on last to a late member.

    It also brings the optimizer's state of the members that gave the stages, because the SWARM
    trains with the same optimizer and batch. Meanwhile the SWARM trains up to its next round, where
    it waits for this member, for a bounded time. If it has ended, its last checkpoint is taken.
    """

    def __init__(
        self, ask: Callable[[SwarmAnnounce], SwarmPlace], states: StageStates, *,
        should_stop: Callable[[], bool] = lambda: False, close: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Ask the hub for donors, until `should_stop`; `close` the states once they are loaded."""
        self._ask, self._states, self._stop, self._close = ask, states, should_stop, close

    @classmethod
    def of(cls, joined: JoinedJob, *, should_stop: Callable[[], bool]) -> LateStages:
        """Return the states of a member's job."""
        link = joined.connection.link

        def ask(question: SwarmAnnounce) -> SwarmPlace:
            place = link.request(question, timeout_s=ASK_S)
            if not isinstance(place, SwarmPlace):
                raise PeerLost(
                    "the hub names no donors of a stage", given=f"stage {question.stage}"
                )
            return place

        states = JobStates.of(joined, should_stop=should_stop)
        return cls(ask, states, should_stop=should_stop, close=states.close)

    def take_over(self, task: Task, stages: Sequence[MetStage]) -> int:
        """Load all stages, after the same number of rounds.

        Return the last step of a SWARM that is over; -1: it goes on.

        Raises:
            GroupLeft: this member was asked to stop before the stages had come.
            CheckpointError: the states are of another model.
        """
        model = _Joined([met.stage for met in stages])
        try:
            parts, places = self._parts(model, len(stages))
            self._load(task, model, parts)
        finally:
            self._close()
        tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
        over = all(place.finished for place in places)
        rounds = [] if over else [int(part.metadata[ROUND]) for part in parts]
        task.step = max(int(part.metadata[STEP]) for part in parts)
        for number, met in enumerate(stages):
            own = met.task
            own.step, own.tokens = task.step, task.tokens
            own.round = rounds[number] if rounds else places[number].round
            met.outer.load(tensors)
            task.round = own.round
        if task.scheduler is not None:
            task.scheduler.load_state_dict({"step": task.step})
        log.info("%s: has taken over the stages of step %s", task.member, task.step)
        return task.step if over else -1

    def _load(self, task: Task, model: _Joined, parts: Sequence[Part]) -> None:
        try:
            load_stage(Trained(model, task.optimizer), parts)
        except CheckpointError as error:
            log.warning("%s: its optimizer starts anew: %s", task.member, error)
            load_stage(Trained(model, None), parts)
        task.push()

    def _parts(self, model: _Joined, count: int) -> tuple[list[Part], list[SwarmPlace]]:
        number, trouble = 0, ""
        while not self._stop():
            places = [self._ask(SwarmAnnounce(stage=stage)) for stage in range(count)]
            # Members of a stage that wait in a round still name the step before it.
            behind, number = number % 2, number + 1
            try:
                if all(place.finished for place in places):
                    if places[0].step < 0:
                        raise GroupLeft("the other members have ended, and saved no last state")
                    return self._saved(model, places), places
                parts = [self._donated(place, behind) for place in places]
                if any(len({p.metadata[key] for p in parts}) == 1 for key in (STEP, ROUND)):
                    return parts, places
                trouble = "its members are after different rounds"
            except (GroupError, CheckpointError) as error:
                if isinstance(error, GroupLeft):
                    raise
                trouble = str(error)
            if number == SOON:
                log.warning("the stages of the model have not come yet: %s", trouble)
            threading.Event().wait(PAUSE_S if number < SOON else LONG_S)
        raise GroupLeft("this member was asked to stop before the stages came", given=trouble)

    def _saved(self, model: _Joined, places: Sequence[SwarmPlace]) -> list[Part]:
        names, step = Trained(model, None).model_tensors(), places[0].step
        parts = list(self._states.saved(step, names, stage=places[0].stage))
        return [Part(part.name, part.tensors, {**part.metadata, STEP: str(step)}) for part in parts]

    def _donated(self, place: SwarmPlace, behind: int) -> Part:
        if not place.donors:
            raise PeerLost("a stage has no donors at present", given=f"stage {place.stage}")
        return self._states.donated(msgspec.structs.replace(place, step=place.step - behind))
