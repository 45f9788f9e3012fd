"""The built-in trainer: from a job file to trained weights, as one member of a group."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from atoll import __version__
from atoll.checkpoint import Store, describe, resume, save, save_weights
from atoll.clock import Clock, RealClock
from atoll.codec import make_codec
from atoll.config import JobSpec
from atoll.data import Cursor, Dataset, Shards, load_dataset
from atoll.errors import HubError, StorageFull
from atoll.group.alone import Alone
from atoll.group.group import Group
from atoll.models import GPT, build_model
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.strategy import Outer, SyncResult
from atoll.strategies.table import build_outer, resolve
from atoll.task import Task
from atoll.train.chain import chained
from atoll.train.evaluate import Evaluation, evaluate
from atoll.train.loop import LEFT, Loop
from atoll.train.memory import memory_errors
from atoll.train.metrics import Recorder, Totals
from atoll.train.optimizers import StepSchedule, build_optimizer, learning_rate
from atoll.train.sample import SAMPLE_PROMPT, SAMPLE_TOKENS, write_text
from atoll.train.stream import MemberStream
from atoll.wire.messages import Event, Point

log = logging.getLogger(__name__)

EVALUATIONS = 10
CHECKPOINTS = 8
"""How many a run has about, when the job does not say."""


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
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Train one member's share of a job and return its part of the summary.

    Args:
        spec: The job.
        group: The members; `Alone()` without a hub.
        directory: Where this member's files go.
        report: Takes measurements; MUST NOT block.
        announce: Takes events for people; MUST NOT block.
        store: Where checkpoints go; None: nowhere.
        resume_round: The checkpoint to start from; -1: start fresh.
        slot: Own data slot.
        num_slots: Slots the data is dealt to; the job's `nodes` by default.
        publish: Uploads a finished file under a name; called by the first member.
        should_stop: Asked before every step; True: leave at once.
        clock: Source of time.

    Raises:
        ConfigError: the job names something that does not exist.
        DataError: the text is missing or too small.
        LossNotFinite: the loss or a gradient became so; nothing was updated.
        OutOfMemory: this machine's memory does not suffice.
        GroupError: the members could not agree any more.
        CheckpointError: the checkpoint to start from cannot be used.
    """
    clock = clock if clock is not None else RealClock()
    with memory_errors(member=group.me):
        trainer = Trainer(spec, group=group, directory=directory, clock=clock, store=store)
        trainer.prepare(slot=slot, num_slots=num_slots or spec.job.nodes, round_=resume_round)
        trainer.connect(report=report, announce=announce, publish=publish)
        try:
            return trainer.run(should_stop or (lambda: False), fresh=resume_round < 0)
        finally:
            trainer.recorder.close()


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """After which rounds something happens."""

    evaluate: int
    save: int

    @classmethod
    def of(cls, spec: JobSpec, rounds: int) -> _Rhythm:
        """Return what the job says, or what divides a run of so many rounds well."""
        return cls(
            spec.train.eval_every or max(1, rounds // EVALUATIONS),
            spec.checkpoint.every or max(1, rounds // CHECKPOINTS),
        )


class Trainer:
    """One member's parts of a job, put together."""

    model: GPT
    dataset: Dataset
    task: Task
    outer: Outer
    stream: MemberStream
    recorder: Recorder

    def __init__(
        self, spec: JobSpec, *, group: Group, directory: Path, clock: Clock, store: Store | None
    ) -> None:
        """Remember where things are; nothing is built yet."""
        self.spec, self.group, self.directory = spec, group, directory
        self.clock, self.store = clock, store
        self.totals = Totals()
        self.began = clock.monotonic()
        self.start_s = 0.0
        self.chain = ""
        self.first = Evaluation(0.0, 0)
        self._saved_round = -1
        self._publish: Callable[[Path, str], None] | None = None

    # ----------------------------------------------------------------------- putting together

    def prepare(self, *, slot: int, num_slots: int, round_: int) -> None:
        """Build data, model, optimizer and strategy; restore a checkpoint if one is named."""
        spec, resolved = self.spec, resolve(self.spec.strategy, steps=self.spec.train.steps)
        if spec.job.threads:
            torch.set_num_threads(spec.job.threads)
        data, seed = spec.data, spec.job.seed
        self.outer, self.codec = build_outer(resolved), make_codec(resolved.codec)
        self.dataset = load_dataset(
            data.corpus, tokenizer=data.tokenizer, held_out=data.held_out, seed=seed
        )
        torch.manual_seed(seed)
        options = {"vocab_size": self.dataset.tokenizer.vocab_size, **spec.model.options}
        model = build_model(spec.model.name, **options)
        if not isinstance(model, GPT):
            raise TypeError(f"model {spec.model.name!r} cannot be trained by the built-in trainer")
        self.model = model
        optimizer = build_optimizer(model, spec.train)
        schedule = StepSchedule(optimizer, learning_rate(spec.train))
        self.task = Task(model, optimizer, schedule, member=self.group.me)
        self.shards = Shards(
            self.dataset.train, slots=num_slots, context=model.config.context, seed=seed,
            order=data.order,
        )  # fmt: skip
        self.slot, self.num_slots = slot, num_slots
        # What only dropout uses differs from member to member; the weights above do not.
        torch.manual_seed(seed * 1_000 + slot + 1)
        if round_ >= 0:
            cursor = self._restore(round_)
        else:
            cursor, self.task.round = None, self.group.committed_round
            self.outer.setup(self.task, group=self.group, codec=self.codec)
        self.stream = MemberStream(
            self.shards, slot=slot, batch=spec.train.batch, step=self.task.step,
            shared_steps=self.outer.shared_steps, cursor=cursor,
        )  # fmt: skip
        elements = self.task.num_parameters + sum(b.numel() for b in self.task.buffers())
        plan = self.outer.traffic(elements, max(2, num_slots), steps=spec.train.steps)
        self.rhythm = _Rhythm.of(spec, plan.rounds)

    def _restore(self, round_: int) -> Cursor | None:
        """Put a checkpoint back; return the place in the data."""
        if self.store is None:
            raise RuntimeError("resuming needs a store")
        restored = resume(self.store, round_, self.task)
        self.outer.setup(self.task, group=self.group, codec=self.codec)
        self.outer.load_state_dict(restored.outer)
        self.totals.load(restored.counters)
        self.chain = str(restored.counters.get("chain", ""))
        sums = (restored.counters.get(name, 0) for name in ("first_loss_sum", "first_tokens"))
        self.first = Evaluation(*(float(value) for value in sums))  # type: ignore[arg-type]
        self._saved_round = round_
        return Cursor.from_dict(restored.cursor) if restored.cursor is not None else None

    def connect(
        self,
        *,
        report: Callable[[Point], None] | None,
        announce: Callable[[Event], None] | None,
        publish: Callable[[Path, str], None] | None,
    ) -> None:
        """Say where measurements, events and files go."""
        self.recorder = Recorder(
            self.task, clock=self.clock, path=self.directory / "metrics.jsonl",
            report=report, announce=announce,
        )  # fmt: skip
        self._publish = publish

    # ------------------------------------------------------------------------------- running

    def run(self, should_stop: Callable[[], bool], *, fresh: bool) -> dict[str, Any]:
        """Train to the end, or to a stop; return this member's part of the summary."""
        self.start_s = self.clock.monotonic() - self.began
        self.recorder.point({"parameters": self.task.num_parameters, "start_s": self.start_s})
        if fresh:
            begun = self.outer.begin(self.task)
            if begun is not None:
                self.chain = chained(self.chain, begun)
            self.first = self._evaluate_share()
        loop = Loop(
            task=self.task, stream=self.stream,
            inner=Local(language_model_loss, clip=self.spec.train.clip),
            outer=self.outer, group=self.group, steps=self.spec.train.steps,
            recorder=self.recorder, totals=self.totals, clock=self.clock,
            after_round=self._after_round, should_stop=should_stop,
        )  # fmt: skip
        reason = loop.run()
        if reason and isinstance(self.group, Alone):
            self._save()  # nobody else has to agree that this is a good moment
        result = self._result(reason)
        # Who leaves between two rounds has no agreed model to give; the others go on.
        left = reason == LEFT and not isinstance(self.group, Alone)
        if self._is_first and not left:
            self._save_model()
            if not reason:
                result |= self._finish()
        path = self.directory / "result.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        return result

    @property
    def _is_first(self) -> bool:
        """Whether this member does what only one has to."""
        return not self.group.members or self.group.members[0] == self.group.me

    def _after_round(self, sync: SyncResult, last: bool) -> None:
        """Save and evaluate after a committed round, if it is time."""
        self.chain = chained(self.chain, sync)
        stopping = self.group.stopping
        if stopping or (self.task.round % self.rhythm.save == 0 and not last):
            self._save()
        if self.task.round % self.rhythm.evaluate == 0 and not last:
            self._evaluate_share()

    def _evaluate_share(self) -> Evaluation:
        """Evaluate this member's share of the held-out text on the common parameters."""
        began = self.clock.monotonic()
        members = self.group.members or (self.group.me,)
        found = evaluate(
            self.model, self.dataset.held_out, context=self.model.config.context,
            limit_tokens=self.spec.train.eval_tokens, share=members.index(self.group.me),
            shares=len(members),
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

    def _save(self) -> None:
        """Save a checkpoint; failing to do so is reported and does not end the run."""
        if self.store is None or self._saved_round == self.task.round:
            return
        began = self.clock.monotonic()
        counters: dict[str, float | int | str] = {
            **self.totals.to_dict(),
            "chain": self.chain,
            "first_loss_sum": self.first.loss_sum,
            "first_tokens": self.first.tokens,
        }
        try:
            save(
                self.store, self.task.round, self.task, members=self.group.members,
                shared=self._is_first, outer=self.outer.state_dict(), codec={},
                cursor=self.stream.cursor.to_dict(), counters=counters, about=self._about(),
                own_model=not self.outer.one_model,
            )  # fmt: skip
            self._saved_round = self.task.round
        except (StorageFull, HubError) as error:
            log.error("the checkpoint of round %s was not saved: %s", self.task.round, error)
            text = f"{self.task.member}: checkpoint of round {self.task.round} not saved: {error}"
            self.recorder.event("checkpoint-failed", text)
        self.totals.checkpoint_s += self.clock.monotonic() - began

    def _about(self) -> dict[str, str]:
        """Return the metadata that rebuild the model."""
        options = {"vocab_size": self.dataset.tokenizer.vocab_size, **self.spec.model.options}
        about = describe(
            self.spec.model.name, options=options, tokenizer=self.dataset.tokenizer.to_json()
        )
        return about | {"step": str(self.task.step), "round": str(self.task.round)}

    # ------------------------------------------------------------------------------- the end

    def _finish(self) -> dict[str, Any]:
        """Evaluate on all held-out text and let the model write something."""
        began = self.clock.monotonic()
        found = evaluate(self.model, self.dataset.held_out, context=self.model.config.context)
        self.totals.evaluation_s += self.clock.monotonic() - began
        self.recorder.point({"held_out_loss": found.loss})
        text = write_text(
            self.model, self.dataset.tokenizer, SAMPLE_PROMPT, tokens=SAMPLE_TOKENS,
            seed=self.spec.job.seed,
        )  # fmt: skip
        return {
            "loss_final": found.loss,
            "bytes_per_token": self.dataset.held_out.bytes_per_token,
            "sample": text,
        }

    def _save_model(self) -> None:
        """Write the weights, and upload them."""
        path = self.directory / "model.safetensors"
        save_weights(path, self.model.state_dict(), about=self._about())
        if self._publish is not None:
            self._publish(path, "model.safetensors")

    def _result(self, reason: str) -> dict[str, Any]:
        """Return this member's part of the summary."""
        totals, task = self.totals, self.task
        return {
            "member": task.member,
            "slot": self.slot,
            "steps": task.step,
            "tokens": task.tokens,
            "rounds": task.round,
            **totals.to_dict(),
            "start_s": self.start_s,
            "parameters": task.num_parameters,
            "first_loss_sum": self.first.loss_sum,
            "first_tokens": self.first.tokens,
            "digests": self.chain,
            "digest": self.outer.digest(task),
            "data_digest": self.dataset.digest,
            "tokens_per_s": task.tokens / totals.wall_s if totals.wall_s > 0 else 0.0,
            "stopped": bool(reason),
            "reason": reason,
            "seed": self.spec.job.seed,
            "versions": versions(),
        }


def versions() -> dict[str, str]:
    """Return what is needed to run it again."""
    return {
        "atoll": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
