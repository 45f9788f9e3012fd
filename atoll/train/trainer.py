"""The built-in trainer: train one member of a group, from a job file to trained weights.

`Trainer.train`: `prepare` builds model, optimizer and strategy or restores a checkpoint, attaches
outputs and offers the state to late members; `run` makes all members start alike, runs the inner
loop, and saves the result.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from atoll.checkpoint import Extras, adopt, kept_state, resume, save_weights
from atoll.clock import RealClock
from atoll.config import JobSpec
from atoll.data import Cursor
from atoll.devices.choose import CPU, choose
from atoll.devices.errors import device_errors
from atoll.errors import ConfigError, GroupLeft, HubError, LeftBehind, StorageFull
from atoll.group.base import Group
from atoll.group.single import SingleGroup
from atoll.ids import slot_of
from atoll.island.morph_orders import Moved
from atoll.strategies.base import Inner, Outer, SyncResult, extend_history_hash
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.build import Built, Intervals, build
from atoll.train.computing import options_on
from atoll.train.evaluate import Evaluation, evaluate
from atoll.train.loop import LEFT, Loop
from atoll.train.out_of_memory import memory_errors
from atoll.train.results.data_preview import publish_preview
from atoll.train.results.metrics import Recorder, Totals
from atoll.train.results.outputs import Outputs
from atoll.train.results.result import final_evaluation, member_result
from atoll.train.state.committed import CommittedState
from atoll.train.state.recovery_client import RecoveryClient, RolledBack
from atoll.train.state.saving import NOT_SAVED, Saving, carrying
from atoll.train.verification.witness import Witness, watch
from atoll.wire.messages import Registered

if TYPE_CHECKING:
    from atoll.train.island.island_trainer import TrainerIsland

log = logging.getLogger(__name__)


class Trainer:
    """One member's model, strategy, data and outputs, and the order in which they run."""

    built: Built
    task: Task
    device: torch.device
    """Where the model is."""
    outer: Outer
    inner: Inner
    stream: MemberStream
    intervals: Intervals
    recorder: Recorder
    start: Registered
    witness: Witness | None = None

    def __init__(
        self,
        spec: JobSpec,
        *,
        group: Group,
        outputs: Outputs,
        saving: Saving = NOT_SAVED,
        recovery: RecoveryClient | None = None,
        island: TrainerIsland | None = None,
        outer: Outer | None = None,
    ) -> None:
        """Store the arguments.

        `recovery` gets the committed state from other members and serves it to them. `island` are
        the ranks that train, this process being the first; None trains in this process. `outer`
        takes the place of the job's own outer strategy.
        """
        self._other_outer = outer
        self.spec, self.group, self.outputs, self.saving = spec, group, outputs, saving
        self.recovery, self.island = recovery, island
        self._loss_of = island.loss if island is not None else None
        self.clock = RealClock()
        self.totals = Totals()
        self.began = self.clock.monotonic()
        self.start_s = 0.0
        self.first = Evaluation(0.0, 0)
        self._held_out: float | None = None
        self._saved = -1, -1
        self._reserved = False

    def train(
        self, start: Registered, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, Any]:
        """Train to the end or to a stop; return this member's part of the summary.

        Restarts from a checkpoint if no member has the committed state any more.

        Raises:
            ConfigError: the job names something that does not exist.
            DataError: the text is missing or too small.
            LossNotFinite: the loss or a gradient is not finite; nothing was updated.
            OutOfMemory: this machine's memory does not suffice.
            GroupError: the members could not agree any more.
            Moved: the ranks of this island go on in another mesh.
            CheckpointError: the checkpoint to start from cannot be used.
        """
        with memory_errors(member=self.group.me), device_errors():
            while True:
                self.prepare(start)
                try:
                    return self.run(should_stop)
                except RolledBack as error:
                    log.warning("%s", error)
                    self.recorder.event("set-back", f"{self.task.member}: {error}")
                    # Build everything anew: task and strategy hold a state that was rolled back.
                    # The hub leases the data anew after a rollback.
                    self.saving = replace(self.saving, carried=None)
                    start = msgspec.structs.replace(
                        start, resume_round=error.round, recover=False, lease=error.lease
                    )
                finally:
                    self.recorder.close()

    def prepare(self, start: Registered) -> None:
        """Build all parts, restore the checkpoint if there is one, and attach the outputs."""
        # An island has a host model here, and trains on the devices of its ranks.
        wanted = CPU if self.island is not None else self.spec.job.device
        self.device = choose(wanted)
        built = build(
            self.spec, member=self.group.me, slot=start.slot, num_slots=start.num_slots,
            device=self.device,
        )  # fmt: skip
        if self._other_outer is not None:
            built = replace(built, outer=self._other_outer)
        self.built, self.task, self.outer, self.start = built, built.task, built.outer, start
        self.group.aggregation = built.aggregation
        # Changes the model in place (precision, recomputation), so set up the strategy after it.
        self.inner = self._inner()
        if start.resume_round >= 0:
            cursor = self._restore(start.resume_round)
        else:
            cursor, self.task.round = None, self.group.committed_round
            self.outer.setup(self.task, group=self.group, codec=built.codec)
        self.stream = MemberStream(
            built.shards, slot=start.slot, batch=self.spec.train.batch, step=self.task.step,
            shared_steps=self.outer.shared_steps, cursor=cursor, device=self.device,
        )  # fmt: skip
        if start.lease is not None and not start.recover:
            self.stream.move(start.lease.slot, start.lease.cursor)
        self.task.stretch = self.stream
        self.witness = watch(self.task, self.stream, self.spec, self.built)
        self.intervals = built.intervals(self.spec, peers=start.num_slots)
        if self.island is not None:
            self.island.seed(slot=start.slot, step=self.task.step)
        self.recorder = Recorder(
            self.task, clock=self.clock, path=self.outputs.directory / "metrics.jsonl",
            report=self.outputs.report, announce=self.outputs.announce,
        )  # fmt: skip
        if self.recovery is not None and self.outer.inherits:
            self.recovery.offer(self.task, CommittedState(self.task, self.outer))

    def _restore(self, round_: int) -> Cursor | None:
        """Load a checkpoint; return the position in the data."""
        store = self.saving.carried or self.saving.store
        if store is None:
            raise RuntimeError("resuming needs a store")
        restored = resume(store, round_, self.task, strategy=self.built.strategy)
        # The strategy copies the parameters in `setup`, so the restored ones must be there before.
        self.task.push()
        self.outer.setup(self.task, group=self.group, codec=self.built.codec)
        warning = adopt(self.outer, restored, strategy=self.built.strategy)
        if warning:
            log.warning("%s", warning)
        self.outer.rejoin(self.task)
        if self._between_rounds:  # `rejoin` goes to a round
            resume(store, round_, self.task, strategy=self.built.strategy)
            self.task.push()
        self.task.leases = {slot: dict(place) for slot, place in restored.leases.items()}
        self.totals.load(restored.counters)
        self.task.past = str(restored.counters.get("chain", ""))
        sums = (restored.counters.get(name, 0) for name in ("first_loss_sum", "first_tokens"))
        self.first = Evaluation(*(float(value) for value in sums))  # type: ignore[arg-type]
        self._saved = self._now
        if int(restored.counters.get("num_slots", len(self.task.leases))) != self.start.num_slots:
            self.task.leases.clear()  # the data is divided anew: saved positions are invalid
            return None
        place = restored.cursor
        if place is None:
            place = self.task.leases.get(self.start.slot)
        return Cursor.from_dict(place) if place else None

    def run(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Train with the parts that `prepare` built; return the member's part of the summary."""
        self.start_s = self.clock.monotonic() - self.began
        self.recorder.point({"parameters": self.task.num_parameters, "start_s": self.start_s})
        self.recorder.process_began(self.totals)
        try:
            # Start from the others' state, from a restored checkpoint, or fresh and all alike.
            if self.start.recover and self.outer.inherits:
                self._recover(None)
            elif self.start.resume_round < 0:
                self._begin()
        except LeftBehind as error:
            self._recover(error)
        except GroupLeft:
            return self._ended(LEFT)
        loop = Loop(
            task=self.task, stream=self.witness.reading() if self.witness else self.stream,
            inner=self.inner, outer=self.outer, group=self.group, steps=self.spec.train.steps,
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
            self.island.settle(self.built, folder=self.outputs.directory)
            self.task.scaler = self.island.scaler
            return self.island.inner()
        if self.spec.mesh.ranks > 1:
            raise ConfigError(
                "a member of this job is several ranks, and this process is alone",
                given=f"mesh {self.spec.mesh}", expected=f"{self.spec.mesh.ranks} ranks",
                remedy='start it with `atoll run`, or set inner = "local" in [strategy]',
            )  # fmt: skip
        options = options_on(self.spec, self.device)
        local = Local(language_model_loss, clip=options.clip, options=options)
        local.prepare(self.built.model)
        self.task.scaler = local.scaler
        return local

    def _begin(self) -> None:
        """Give all members the same initial weights, and evaluate before the first step."""
        if self.start.slot == 0:
            publish_preview(self.built.dataset, self.outputs.directory, self.outputs.publish)
        extend_history_hash(self.task, self.outer.begin(self.task))
        self.first = self._evaluate_share()

    def _recover(self, error: LeftBehind | None) -> None:
        """Take over the committed state from other members before the next step.

        Raises:
            LeftBehind: recovery is not possible (`error` itself).
            RolledBack: no member has the state; the run continues from a checkpoint.
        """
        if self.recovery is None:
            raise error or LeftBehind(
                "the run is under way", expected="a connection to the other members"
            )
        if not self.outer.inherits:  # models of their own: only the round number is needed
            self.recovery.catch_up(self.task, self.outer)
            self.outer.rejoin(self.task)
            return
        recovered = self.recovery.take(self.task, self.outer)
        # Learning rate and data follow the recovered step.
        self.built.schedule.load_state_dict({"step": self.task.step})
        self.stream.rejoin(self.task.step)
        if self.witness is not None:
            self.witness.restarted()
        if recovered.lease is not None:
            self.stream.move(recovered.lease.slot, recovered.lease.cursor)
        self.recorder.point({"recovered_s": recovered.seconds, "recovered_bytes": recovered.nbytes})

    def _ended(self, reason: str) -> dict[str, Any]:
        """Save the final state and weights, and return this member's part of the summary."""
        if reason and isinstance(self.group, SingleGroup):
            self._save(final=True)  # a single member saves at any step; others only at a round
        result = member_result(
            self.built, self.totals, slot=self.start.slot, seed=self.spec.job.seed,
            start_s=self.start_s, first=self.first, reason=reason,
        )  # fmt: skip
        # A member that left between two rounds has no common model to publish; the others do that.
        left = reason == LEFT and not isinstance(self.group, SingleGroup)
        if self._is_first and not left:
            # A single member may have newer weights than those of the last round.
            halfway = reason and isinstance(self.group, SingleGroup)
            with nullcontext() if halfway else self.outer.evaluating(self.task):
                result |= self._hand_over(finished=not reason)
        text = json.dumps(result, indent=2) + "\n"
        (self.outputs.directory / "result.json").write_text(text, encoding="utf-8", newline="\n")
        return result

    def _hand_over(self, *, finished: bool) -> dict[str, Any]:
        """Write and publish the weights; if `finished`, evaluate them on all held-out data."""
        self.task.pull()
        path = self.outputs.directory / "model.safetensors"
        save_weights(path, kept_state(self.task), about=self._about())
        if self.outputs.publish is not None:
            self.outputs.publish(path, path.name)
        if not finished:
            return {}
        began = self.clock.monotonic()
        look = final_evaluation(self.built, seed=self.spec.job.seed, loss_of=self._loss_of)
        self.totals.evaluation_s += self.clock.monotonic() - began
        self.recorder.point({"held_out_loss": look["loss_final"]})
        return look

    @property
    def _between_rounds(self) -> bool:
        """Whether states between two rounds are saved: of a member alone, which loses no step then.

        Not with asynchronous pipelines: they are emptied for it, which changes the run.
        """
        return isinstance(self.group, SingleGroup) and self.spec.island.schedule != "async"

    @property
    def _now(self) -> tuple[int, int]:
        return self.task.round, self.task.step if self._between_rounds else 0

    @property
    def _members(self) -> tuple[str, ...]:
        """Members of the last round; before the first one only this member."""
        return self.group.members or (self.group.me,)

    @property
    def _is_first(self) -> bool:
        """Whether this member does the work that only one member does."""
        return self._members[0] == self.group.me

    def _after_round(self, sync: SyncResult, last: bool) -> None:
        """Evaluate and save after a committed round, if they are due."""
        stopping = sync.ends(self.group)
        if not self._reserved:
            self._reserved = True
            self.saving.reserve(self.task, self.outer, shared=self._is_first)
        self._held_out = None
        if self.task.round % self.intervals.evaluate == 0 and not last:
            self._held_out = self._evaluate_share().loss
        if stopping or (self.task.round % self.intervals.save == 0 and not last):
            self._save(final=stopping)
        order = self.island.order if self.island is not None else None
        if order is not None and not (stopping or last):
            self._save(final=True, carry=True)
            raise Moved(order, round_=self.task.round)

    def _evaluate_share(self) -> Evaluation:
        """Evaluate the common parameters on this member's share of the held-out data."""
        began, whole = self.clock.monotonic(), self.spec.swarm.whole
        # Beside a SWARM only members with the whole model evaluate.
        members = [m for m in self._members if not whole or slot_of(m) < whole]
        with self.outer.evaluating(self.task):
            found = evaluate(
                self.built.model, self.built.held_out,
                limit_tokens=self.spec.train.eval_tokens,
                share=members.index(self.group.me), shares=len(members),
                loss_of=self._loss_of,
            )  # fmt: skip
        seconds = self.clock.monotonic() - began
        self.totals.evaluation_s += seconds
        self.recorder.point(
            {"held_out_loss_sum": found.loss_sum, "held_out_tokens": found.tokens,
             "evaluation_s": seconds}
        )  # fmt: skip
        return found

    def _save(self, *, final: bool, carry: bool = False) -> None:
        """Save a checkpoint, or what another mesh begins with; a failure does not end the run."""
        if (now := self._now) == self._saved and not carry:
            return  # a stop right after a scheduled save would write the same state twice
        saving = carrying(self.outputs.directory) if carry else self.saving
        began = self.clock.monotonic()
        counters: dict[str, float | int | str] = {
            **self.totals.to_dict(), "chain": self.task.past, "num_slots": self.start.num_slots,
            "first_loss_sum": self.first.loss_sum, "first_tokens": self.first.tokens,
        }  # fmt: skip
        extras = Extras(
            strategy=self.built.strategy, cursor=self.stream.cursor.to_dict(), counters=counters,
            about=self._about(),
        )  # fmt: skip
        members = (self.group.me,) if carry else self._members
        try:
            if saving.save(
                self.task, self.outer, extras, members=members, final=final, score=self._held_out
            ):
                self._saved = now
        except (StorageFull, HubError) as error:
            log.error("the checkpoint of round %s was not saved: %s", self.task.round, error)
            text = f"{self.task.member}: checkpoint of round {self.task.round} not saved: {error}"
            self.recorder.event("checkpoint-failed", text)
        self.totals.checkpoint_s += self.clock.monotonic() - began

    def _about(self) -> dict[str, str]:
        return {**self.built.about, "step": str(self.task.step), "round": str(self.task.round)}
