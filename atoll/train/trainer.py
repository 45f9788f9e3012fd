"""The built-in trainer: train one member of a group, from a job file to trained weights.

`train_job` builds a `Trainer` and runs it in this order: `prepare` builds model, optimizer and
strategy or restores a checkpoint; `connect` attaches outputs and offers the state to late members;
`run` makes all members start alike, runs the inner loop, and saves the result.

The words used here: the strategy has an inner part, which computes a step, and an outer part, which
exchanges updates with the other members in rounds. The data is divided into slots; a member trains
on its own slot, or on the one that the hub leases to it. The committed state is the result of the
last round, the same on all members. An island is a member that consists of several ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.checkpoint import BackgroundSaver, Store, adopt, resume, save_weights
from atoll.clock import Clock, RealClock
from atoll.config import JobSpec
from atoll.data import Cursor
from atoll.errors import ConfigError, GroupLeft, HubError, LeftBehind, StorageFull
from atoll.group.base import Group
from atoll.group.single import SingleGroup
from atoll.strategies.base import Inner, Outer, SyncResult, extend_history_hash
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.inner.options import InnerOptions
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.build import Built, build
from atoll.train.evaluate import Evaluation, evaluate
from atoll.train.loop import LEFT, Loop
from atoll.train.out_of_memory import memory_errors
from atoll.train.results.metrics import Recorder, Totals
from atoll.train.results.result import final_evaluation, member_result
from atoll.train.state.committed import CommittedState
from atoll.train.state.recovery_client import RecoveryClient, RolledBack
from atoll.train.state.saving import Moment, Saving
from atoll.wire.messages import Event, Lease, Point

if TYPE_CHECKING:
    from atoll.train.island.island_trainer import TrainerIsland

log = logging.getLogger(__name__)


def train_job(
    spec: JobSpec,
    *,
    group: Group,
    directory: Path,
    report: Callable[[Point], None] | None = None,
    announce: Callable[[Event], None] | None = None,
    store: Store | None = None,
    resume_round: int = -1,
    slot: int = 0,
    num_slots: int | None = None,
    publish: Callable[[Path, str], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    lifeline: RecoveryClient | None = None,
    late: bool = False,
    lease: Lease | None = None,
    saver: BackgroundSaver | None = None,
    clock: Clock | None = None,
    island: TrainerIsland | None = None,
) -> dict[str, Any]:
    """Train one member's share of a job and return its part of the summary.

    `report` and `announce` receive measurements and events for people, and MUST NOT block. `store`
    takes checkpoints, `saver` writes them in the background; without either none are saved.
    `resume_round` is the round of the checkpoint to start from, -1 for a fresh start. `publish`
    uploads a finished file under a name. `lifeline` recovers the committed state from other members
    and serves it to them; if `late`, the run is under way and recovery comes first. `lease` is the
    data until the first round, None for the own slot. `island` are the ranks that train, this
    process being the first; None trains in this process.

    Raises:
        ConfigError: the job names something that does not exist.
        DataError: the text is missing or too small.
        LossNotFinite: the loss or a gradient is not finite; nothing was updated.
        OutOfMemory: this machine's memory does not suffice.
        GroupError: the members could not agree any more.
        CheckpointError: the checkpoint to start from cannot be used.
    """
    clock = clock if clock is not None else RealClock()
    with memory_errors(member=group.me):
        trainer = Trainer(
            spec, group=group, directory=directory, clock=clock, store=store, lifeline=lifeline,
            saver=saver, island=island,
        )  # fmt: skip
        trainer.prepare(slot=slot, num_slots=num_slots or spec.job.nodes, round_=resume_round)
        if lease is not None and not late:
            trainer.stream.move(lease.slot, lease.cursor)
        trainer.connect(report=report, announce=announce, publish=publish)
        try:
            return trainer.run_through(should_stop or (lambda: False), late=late)
        finally:
            trainer.recorder.close()


class Trainer:
    """One member's model, strategy, data and outputs, and the order in which they run."""

    built: Built
    task: Task
    outer: Outer
    inner: Inner
    stream: MemberStream
    recorder: Recorder

    def __init__(
        self,
        spec: JobSpec,
        *,
        group: Group,
        directory: Path,
        clock: Clock,
        store: Store | None,
        lifeline: RecoveryClient | None = None,
        saver: BackgroundSaver | None = None,
        island: TrainerIsland | None = None,
    ) -> None:
        """Store the arguments; `prepare` builds the parts."""
        self.spec, self.group, self.directory = spec, group, directory
        self.lifeline, self.island = lifeline, island
        self._loss_of = island.loss if island is not None else None
        self.clock, self.store = clock, store
        self.totals = Totals()
        self.began = clock.monotonic()
        self.start_s = 0.0
        self.first = Evaluation(0.0, 0)
        self.saving = Saving(store=store, saver=saver)
        self._held_out: float | None = None
        self._saved_round = -1
        self._reserved = False
        self._publish: Callable[[Path, str], None] | None = None

    def prepare(self, *, slot: int, num_slots: int, round_: int) -> None:
        """Build all parts; restore the checkpoint of `round_` unless it is -1."""
        built = build(self.spec, member=self.group.me, slot=slot, num_slots=num_slots)
        self.built, self.task, self.outer = built, built.task, built.outer
        self.group.policy = built.policy
        # Changes the model in place (precision, recomputation), so set up the strategy after it.
        self.inner = self._inner()
        self.slot, self.num_slots, self.resumed = slot, num_slots, round_ >= 0
        if round_ >= 0:
            cursor = self._restore(round_)
        else:
            cursor, self.task.round = None, self.group.committed_round
            self.outer.setup(self.task, group=self.group, codec=built.codec)
        self.stream = MemberStream(
            built.shards, slot=slot, batch=self.spec.train.batch, step=self.task.step,
            shared_steps=self.outer.shared_steps, cursor=cursor,
        )  # fmt: skip
        self.task.stretch = self.stream
        self.rhythm = built.rhythm(self.spec, peers=num_slots)
        if self.island is not None:
            self.island.seed(slot=slot, step=self.task.step)

    def _restore(self, round_: int) -> Cursor | None:
        """Load a checkpoint; return the position in the data."""
        if self.store is None:
            raise RuntimeError("resuming needs a store")
        restored = resume(self.store, round_, self.task, strategy=self.built.strategy)
        # The strategy copies the parameters in `setup`, so the restored ones must be in place
        # before.
        self.task.push()
        self.outer.setup(self.task, group=self.group, codec=self.built.codec)
        warning = adopt(self.outer, restored, strategy=self.built.strategy)
        if warning:
            log.warning("%s", warning)
        self.outer.rejoin(self.task)
        self.task.leases = {slot: dict(place) for slot, place in restored.leases.items()}
        self.totals.load(restored.counters)
        self.task.past = str(restored.counters.get("chain", ""))
        sums = (restored.counters.get(name, 0) for name in ("first_loss_sum", "first_tokens"))
        self.first = Evaluation(*(float(value) for value in sums))  # type: ignore[arg-type]
        self._saved_round = round_
        if int(restored.counters.get("num_slots", len(self.task.leases))) != self.num_slots:
            # With another number of slots the data is divided anew, and saved positions are
            # invalid.
            self.task.leases.clear()
            return None
        place = restored.cursor if restored.cursor is not None else self.task.leases.get(self.slot)
        return Cursor.from_dict(place) if place else None

    def connect(
        self,
        *,
        report: Callable[[Point], None] | None,
        announce: Callable[[Event], None] | None,
        publish: Callable[[Path, str], None] | None,
    ) -> None:
        """Attach the outputs, and offer the state to late members."""
        self.recorder = Recorder(
            self.task, clock=self.clock, path=self.directory / "metrics.jsonl",
            report=report, announce=announce,
        )  # fmt: skip
        self._publish = publish
        if self.lifeline is not None and self.outer.inherits:
            state = CommittedState(self.task, self.outer)
            self.lifeline.offer(self.task, state)

    def run_through(self, should_stop: Callable[[], bool], *, late: bool) -> dict[str, Any]:
        """Run to the end; restart from a checkpoint if no member has the state any more."""
        while True:
            try:
                return self.run(should_stop, late=late)
            except RolledBack as error:
                log.warning("%s", error)
                self.recorder.event("set-back", f"{self.task.member}: {error}")
                # Build everything anew: task and strategy hold a state that was rolled back.
                report, announce = self.recorder.outlets
                self.recorder.close()
                self.prepare(slot=self.slot, num_slots=self.num_slots, round_=error.round)
                if error.lease is not None:  # the hub leases the data anew after a rollback
                    self.stream.move(error.lease.slot, error.lease.cursor)
                self.connect(report=report, announce=announce, publish=self._publish)
                late = False

    def run(self, should_stop: Callable[[], bool], *, late: bool) -> dict[str, Any]:
        """Train to the end or to a stop; return this member's part of the summary."""
        self.start_s = self.clock.monotonic() - self.began
        self.recorder.point({"parameters": self.task.num_parameters, "start_s": self.start_s})
        try:
            # Start from the others' state, from a restored checkpoint, or fresh and all alike.
            if late and self.outer.inherits:
                self._recover(None)
            elif not self.resumed:
                self._begin()
        except LeftBehind as error:
            self._recover(error)
        except GroupLeft:
            return self._ended(LEFT)
        loop = Loop(
            task=self.task, stream=self.stream,
            inner=self.inner,
            outer=self.outer, group=self.group, steps=self.spec.train.steps,
            recorder=self.recorder, totals=self.totals, clock=self.clock,
            after_round=self._after_round, should_stop=should_stop, recover=self._recover,
        )  # fmt: skip
        return self._ended(loop.run())

    def _inner(self) -> Inner:
        """Return the inner strategy, ready to compute steps.

        Raises:
            ConfigError: the machine cannot compute like that, or the ranks for it are missing.
        """
        if self.island is not None:
            self.island.settle(self.built, folder=self.directory)
            self.task.scaler = self.island.scaler
            return self.island.inner()
        if self.spec.mesh.ranks > 1:
            raise ConfigError(
                "a member of this job is several ranks, and this process is alone",
                given=f"mesh {self.spec.mesh}", expected=f"{self.spec.mesh.ranks} ranks",
                remedy='start it with `atoll run`, or set inner = "local" in [strategy]',
            )  # fmt: skip
        options = InnerOptions.of(self.spec)
        local = Local(language_model_loss, clip=options.clip, options=options)
        local.prepare(self.built.model)
        self.task.scaler = local.scaler
        return local

    def _begin(self) -> None:
        """Give all members the same initial weights, and evaluate before the first step."""
        extend_history_hash(self.task, self.outer.begin(self.task))
        self.first = self._evaluate_share()

    def _recover(self, error: LeftBehind | None) -> None:
        """Take over the committed state from other members before the next step.

        Raises:
            LeftBehind: recovery is not possible (`error` itself).
            RolledBack: no member has the state; the run continues from a checkpoint.
        """
        if self.lifeline is None:
            raise error or LeftBehind("the run is under way", expected="a connection to the others")
        # Members train models of their own: only the round number is needed.
        if not self.outer.inherits:
            self.task.round = self.lifeline.catch_up()
            self.outer.rejoin(self.task)
            return
        taken = self.lifeline.take(self.task, self.outer)
        # The learning rate and the data follow the step, which the recovered state has changed.
        self.built.schedule.load_state_dict({"step": self.task.step})
        self.stream.rejoin(self.task.step)
        if taken.lease is not None:
            self.stream.move(taken.lease.slot, taken.lease.cursor)
        self.recorder.point({"recovered_s": taken.seconds, "recovered_bytes": taken.nbytes})

    def _ended(self, reason: str) -> dict[str, Any]:
        """Save the final state and weights, and return this member's part of the summary."""
        if reason and isinstance(self.group, SingleGroup):
            self._save(final=True)  # a single member saves at any step; others only at a round
        result = member_result(
            self.spec, self.built, self.outer, self.totals, slot=self.slot, start_s=self.start_s,
            first=self.first, reason=reason,
        )  # fmt: skip
        # A member that left between two rounds has no common model to publish; the others do that.
        left = reason == LEFT and not isinstance(self.group, SingleGroup)
        if self._is_first and not left:
            # A single member stopped within a period publishes its newest weights, not the last
            # round's.
            halfway = reason and isinstance(self.group, SingleGroup)
            with nullcontext() if halfway else self.outer.evaluating(self.task):
                result |= self._hand_over(finished=not reason)
        path = self.directory / "result.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result

    def _hand_over(self, *, finished: bool) -> dict[str, Any]:
        """Write and publish the weights; if `finished`, evaluate them on all held-out data."""
        self.task.pull()
        path = self.directory / "model.safetensors"
        save_weights(path, self.built.model.state_dict(), about=self._about())
        if self._publish is not None:
            self._publish(path, path.name)
        if not finished:
            return {}
        began = self.clock.monotonic()
        look = final_evaluation(self.built, seed=self.spec.job.seed, loss_of=self._loss_of)
        self.totals.evaluation_s += self.clock.monotonic() - began
        self.recorder.point({"held_out_loss": look["loss_final"]})
        return look

    @property
    def _is_first(self) -> bool:
        """Whether this member does the work that only one member does."""
        return not self.group.members or self.group.members[0] == self.group.me

    def _after_round(self, sync: SyncResult, last: bool) -> None:
        """Evaluate and save after a committed round, if they are due."""
        stopping = sync.ends(self.group)
        if not self._reserved:
            self._reserved = True
            self.saving.reserve(self.task, self.outer, shared=self._is_first)
        self._held_out = None
        if self.task.round % self.rhythm.evaluate == 0 and not last:
            self._held_out = self._evaluate_share().loss
        if stopping or (self.task.round % self.rhythm.save == 0 and not last):
            self._save(final=stopping)

    def _evaluate_share(self) -> Evaluation:
        """Evaluate the common parameters on this member's share of the held-out data."""
        began = self.clock.monotonic()
        members = self.group.members or (self.group.me,)
        with self.outer.evaluating(self.task):
            found = evaluate(
                self.built.model, self.built.held_out,
                limit_tokens=self.spec.train.eval_tokens, share=members.index(self.group.me),
                shares=len(members),
                loss_of=self._loss_of,
            )  # fmt: skip
        seconds = self.clock.monotonic() - began
        self.totals.evaluation_s += seconds
        self.recorder.point(
            {
                "held_out_loss_sum": found.loss_sum,
                "held_out_tokens": found.tokens,
                "evaluation_s": seconds,
            }
        )
        return found

    def _save(self, *, final: bool) -> None:
        """Save a checkpoint; a failure is reported and does not end the run."""
        # A stop right after a scheduled save would write the same state twice.
        if self._saved_round == self.task.round:
            return
        began = self.clock.monotonic()
        counters: dict[str, float | int | str] = {
            **self.totals.to_dict(),
            "chain": self.task.past,
            "num_slots": self.num_slots,
            "first_loss_sum": self.first.loss_sum,
            "first_tokens": self.first.tokens,
        }
        moment = Moment(
            members=self.group.members, shared=self._is_first, final=final,
            score=self._held_out, counters=counters, about=self._about(),
            cursor=self.stream.cursor.to_dict(), strategy=self.built.strategy,
        )  # fmt: skip
        try:
            if self.saving.save(self.task, self.outer, moment):
                self._saved_round = self.task.round
        except (StorageFull, HubError) as error:
            log.error("the checkpoint of round %s was not saved: %s", self.task.round, error)
            text = f"{self.task.member}: checkpoint of round {self.task.round} not saved: {error}"
            self.recorder.event("checkpoint-failed", text)
        self.totals.checkpoint_s += self.clock.monotonic() - began

    def _about(self) -> dict[str, str]:
        now = {"step": str(self.task.step), "round": str(self.task.round)}
        return {**self.built.about, **now}
