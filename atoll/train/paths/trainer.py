"""Train the paths that the hub gives a member, phase by phase; see `atoll/paths/ledger.py`.

In a phase a member trains each of its paths for the steps between two rounds, from what the paths'
modules agreed on last. Then the holders of each module meet. A path's documents and its learning
rate follow from the step, so it does not matter who trains it; the optimizer's state of a path
stays with the member, and starts anew when another one takes the path over.
"""

from __future__ import annotations

import copy
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from atoll.checkpoint import save_weights
from atoll.checkpoint.format.pieces import ShardedInfo
from atoll.clock import RealClock
from atoll.config import JobSpec
from atoll.data import Cursor
from atoll.devices.choose import choose
from atoll.devices.errors import device_errors
from atoll.errors import CheckpointError, GroupError, GroupLeft
from atoll.group.base import Group
from atoll.ids import slot_of
from atoll.paths.layout import PathLayout, weights_name
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.outer.base import OuterDefaults
from atoll.train.batches import MemberStream
from atoll.train.build import EVALUATIONS, build
from atoll.train.computing import options_on
from atoll.train.evaluate import evaluate
from atoll.train.loop import LEFT, Loop
from atoll.train.out_of_memory import memory_errors
from atoll.train.paths.data import PathData, path_data
from atoll.train.paths.modules import HeldModules, phase_steps
from atoll.train.paths.start import begin_from
from atoll.train.paths.states import ModuleStates, module_part
from atoll.train.results.metrics import Recorder, Totals
from atoll.train.results.outputs import Outputs
from atoll.train.results.result import run_result
from atoll.wire import paths as wire
from atoll.wire.paths import PathAsk, PathMeeting, PathReport, PathShard, PathTrained, PathTurn

log = logging.getLogger(__name__)

TRIES = 3
"""Turns in a row without the modules for them; then the others go on without this member."""
STOPPED = "the job was asked to stop"


class Turns(Protocol):
    """The hub's part: both wait for news for some seconds."""

    def ask(self, body: PathAsk) -> PathTurn:
        """Return the next turn; of phase -1 if there is none yet."""
        ...

    def trained(self, body: PathTrained) -> PathMeeting:
        """Say that the paths are trained; return whether modules meet now."""
        ...


@dataclass(frozen=True, slots=True)
class PathMember:
    """A member's connections."""

    name: str
    group_of: Callable[[int], Group]
    """Returns the group whose rounds a module's holders meet in."""
    turns: Turns
    states: ModuleStates
    outputs: Outputs
    should_stop: Callable[[], bool] = lambda: False


class PathTrainer:
    """See the module's docstring."""

    def __init__(self, spec: JobSpec, member: PathMember) -> None:
        """Build model, optimizer and data, with the weights of the start.

        Raises:
            ConfigError: the job cannot be trained like that.
            DataError: the text is missing or too small, or does not fit the assignment.
        """
        self.spec, self.member = spec, member
        self.layout = PathLayout.of(spec.dipaco.modules, copies=spec.dipaco.copies)
        self.device = choose(spec.job.device)
        resolved = check_job(spec)
        self.group = member.group_of(0)
        self.group.aggregation = resolved.aggregation
        self.steps = phase_steps(resolved, steps=spec.train.steps)
        self.built = built = build(
            spec, member=member.name, slot=0, num_slots=self.layout.num_paths, device=self.device
        )
        begin_from(spec.dipaco.start, built.model)
        self.task = built.task
        self.task.paced = False
        self.modules = HeldModules(
            self.task, self.layout, resolved=resolved, group_of=member.group_of,
            rescaled=spec.dipaco.rescale == "sqrt",
        )  # fmt: skip
        self.data: PathData = path_data(spec, built)
        options = options_on(spec, self.device)
        self.inner = Local(language_model_loss, clip=options.clip, options=options)
        self.inner.prepare(built.model)
        self.stream = MemberStream(
            self.data.deal, slot=0, batch=spec.train.batch, device=self.device
        )
        self._fresh = copy.deepcopy(self.task.optimizer.state_dict())
        self._optimizers: dict[int, Mapping[str, Any]] = {}
        """The optimizer's state of each path that this member has trained."""
        self._evaluate = spec.train.eval_every or max(1, (len(self.steps) - 1) // EVALUATIONS)
        self._process, self._history, self._lost = secrets.token_hex(8), 0, False
        self._missed = 0
        """Turns in a row for which modules could not be fetched."""
        self._done, self._began = 0, False
        self._sizes = [PathShard(*size) for size in self.data.sizes]
        self.clock, self.totals = RealClock(), Totals()
        self.recorder = Recorder(
            self.task, clock=self.clock, path=member.outputs.directory / "metrics.jsonl",
            report=member.outputs.report, announce=member.outputs.announce,
        )  # fmt: skip
        member.states.offer_several(
            self.modules.state, still=self.task.state_lock.still, images=2 * self.layout.levels
        )

    # ----------------------------------------------------------------------------- the run

    def train(self) -> dict[str, Any]:
        """Train to the end or to a stop; return this member's part of the summary.

        Raises:
            LossNotFinite: the loss or a gradient is not finite; nothing was updated.
            OutOfMemory: this machine's memory does not suffice.
            GroupError: the members could not agree any more.
        """
        try:
            with memory_errors(member=self.member.name), device_errors():
                result = self._ended(self._run())
                self.recorder.point({"tokens": self.task.tokens, "wall_s": self.totals.wall_s})
                return result
        finally:
            self.recorder.close()

    def _run(self) -> str:
        """Do phase by phase; return why the run ended early, or an empty text."""
        while not self.member.should_stop():
            turn = self.member.turns.ask(
                PathAsk(
                    phase=self.modules.phase, phases=len(self.steps) - 1,
                    held=self.modules.held(), versions=self.modules.versions(),
                    process=self._process, lost=self._lost, shards=self._sizes,
                )
            )  # fmt: skip
            self._sizes = []
            if turn.phase >= 0:
                self._move(turn)
            if turn.over:
                return STOPPED if turn.stopped else ""
            if turn.phase < 0:
                continue
            if not self._take(turn):
                self._missed += 1
                self._lost = self._missed % TRIES == 0
                continue
            self._lost, self._missed = False, 0
            try:
                self._do(turn)
            except GroupLeft:
                return LEFT
        return LEFT

    def _move(self, turn: PathTurn) -> None:
        """Set step and round to the beginning of a turn's phase; record the run's first one."""
        self.task.step = self.steps[min(turn.phase, len(self.steps) - 1)]
        self.task.round = turn.phase
        if not self._began:
            self._began = True
            self.recorder.process_began(self.totals)
            self.recorder.point({"parameters": self.task.num_parameters})

    def _do(self, turn: PathTurn) -> None:
        """Do a turn: save, train or export its paths, and meet.

        Raises:
            GroupLeft: this member was asked to leave.
        """
        self._save(turn)
        reports = [self._path(path, turn) for path in turn.paths]
        held, versions = self.modules.held(), self.modules.versions()
        if not self._wait(PathTrained(turn.phase, reports, held, versions)):
            self._lost = True
            with self.task.state_lock.moving():
                self.modules.drop()
            return
        with self.task.state_lock.moving():
            self.modules.forget(but=self.layout.modules_in(turn.paths))
        if turn.last:
            return
        step = self.steps[turn.phase + 1]
        with self.task.state_lock.moving():
            began = self.clock.monotonic()
            for result in self.modules.meet(step=step, last=turn.phase + 2 == len(self.steps)):
                now = self.clock.monotonic()
                self.totals.wall_s += now - began
                self.totals.sync_s += result.held_up_s
                self.totals.aborted += result.aborted
                began = now
            self.modules.phase = turn.phase + 1
        self._done += 1
        self.task.step, self.task.round = step, turn.phase + 1
        self.totals.sent_bytes = float(self.group.sent_bytes)
        self.totals.received_bytes = float(self.group.received_bytes)

    def _wait(self, body: PathTrained) -> bool:
        """Wait until all members have trained; return whether this one still takes part."""
        while True:
            found = self.member.turns.trained(body)
            if found.meet or found.void:
                return found.meet
            if self.member.should_stop():
                raise GroupLeft("this member was asked to leave", given=self.member.name)

    # ---------------------------------------------------------------------------- modules

    def _take(self, turn: PathTurn) -> bool:
        """Hold the modules of a turn; return whether all could be fetched."""
        modules, wanted = self.modules, self.layout.modules_in(turn.paths)
        step = self.steps[turn.phase]
        with self.task.state_lock.moving():
            if turn.history != self._history:  # all went back to a checkpoint
                modules.forget()
                self._optimizers.clear()
            self._history = turn.history
            # What it no longer needs others may take over from it, until all have trained.
            modules.forget(but=[m for m in modules.held() if m not in turn.donors])
            modules.phase = turn.phase
        for module in wanted:
            now = modules.held().get(module), modules.versions().get(module)
            if now == (turn.rounds[module], turn.versions[module]):
                with self.task.state_lock.moving():
                    modules.keep(module, step=step)
            elif not self._fetch(module, turn):
                return False
        return True

    def _fetch(self, module: int, turn: PathTurn) -> bool:
        """Take a module from its holders or the checkpoint; return whether that succeeded."""
        states, round_, found = self.member.states, turn.rounds[module], None
        try:
            if donors := turn.donors.get(module):
                number = self.modules.number_of(module, round_)
                found = states.donated(number, donors, serves=turn.serves)
            elif turn.checkpoint >= 0:
                found = states.saved(turn.checkpoint, module)
        except (GroupError, CheckpointError) as error:
            log.warning("%s could not get module %s: %s", self.member.name, module, error)
            return False
        with self.task.state_lock.moving():
            self.modules.take(
                module, found, step=self.steps[turn.phase], round_=round_,
                version=turn.versions[module],
            )  # fmt: skip
        return True

    def _save(self, turn: PathTurn) -> None:
        """Save the modules that this member is to save for the checkpoint of this phase."""
        if not turn.save:
            return
        began = self.clock.monotonic()
        info = ShardedInfo(step=self.steps[turn.phase], texts=dict(self.built.about))
        about = msgspec.json.encode(info).decode()
        parts = [
            module_part(
                module, self.modules.tensors(module), history=turn.history,
                about=about if module == 0 else "",
            )
            for module in turn.save
        ]  # fmt: skip
        if not self.member.states.save(parts, round_=turn.phase, final=turn.last):
            text = f"{self.member.name}: modules of phase {turn.phase} were not saved"
            self.recorder.event("checkpoint-failed", text)
        self.totals.checkpoint_s += self.clock.monotonic() - began

    # ------------------------------------------------------------------------------ a path

    def _path(self, path: int, turn: PathTurn) -> PathReport:
        """Train a path for a phase, or export it at the end of the run.

        Raises:
            GroupLeft: this member was asked to leave.
        """
        self.recorder.labels = {"path": path}
        self.task.step = step = self.steps[turn.phase]  # the path before has moved it
        with self.task.state_lock.moving():
            self.modules.load(path)
        held_out = wire.usable_loss(self._held_out(path, turn))
        if turn.last:
            if not self.data.held_out or held_out is None:
                self._publish(path)
            return PathReport(path, step, held_out=held_out, measured=step, exported=True)
        self._begin(path, turn.phase)
        before = self.task.tokens
        loop = Loop(
            task=self.task, stream=self.stream, inner=self.inner, outer=OuterDefaults(),  # type: ignore[arg-type]
            group=self.group, steps=self.steps[turn.phase + 1], recorder=self.recorder,
            totals=self.totals, clock=self.clock, after_round=lambda sync, last: None,
            should_stop=self.member.should_stop,
        )  # fmt: skip
        if loop.run():
            raise GroupLeft("this member was asked to leave", given=self.member.name)
        tokens = self.task.tokens - before
        with self.task.state_lock.moving():
            self.modules.collect(path, weight=tokens * self.data.weights[path])
        self._optimizers[path] = self.task.optimizer.state_dict()
        loss = wire.usable_loss(self.task.losses.take())
        return PathReport(
            path, self.task.step, tokens=tokens, loss=loss, held_out=held_out, measured=step
        )

    def _begin(self, path: int, phase: int) -> None:
        """Set step, optimizer, learning rate, data and random numbers for a path."""
        step, task = self.steps[phase], self.task
        task.step = step
        task.free_period()
        task.losses.take()
        # The optimizer trains the very tensors that it loads.
        saved = self._optimizers.get(path) or copy.deepcopy(self._fresh)
        task.optimizer.load_state_dict(dict(saved))
        self.built.schedule.load_state_dict({"step": step})
        read, size = step * self.spec.train.batch, self.data.deal.num_windows(path)
        self.stream.move(path, Cursor(path, *divmod(read, size)).to_dict())
        torch.manual_seed((self.spec.job.seed * 1_009 + path + 1) * 1_000_003 + step)

    def _held_out(self, path: int, turn: PathTurn) -> float | None:
        """Return a path's loss on its own held-out data, if it is due; keep its best weights."""
        due = turn.last or (turn.phase > 0 and turn.phase % self._evaluate == 0)
        if not due:
            return None
        began = self.clock.monotonic()
        batches = self.data.held_out(path) if self.data.held_out else self.built.held_out
        found = evaluate(self.built.model, batches, limit_tokens=self.spec.train.eval_tokens)
        self.totals.evaluation_s += self.clock.monotonic() - began
        self.recorder.point(
            {
                "held_out_loss_sum": found.loss_sum, "held_out_tokens": found.tokens,
                "evaluation_s": self.clock.monotonic() - began,
            }
        )  # fmt: skip
        if not self.data.held_out:
            return None
        if found.loss < turn.best.get(path, float("inf")):
            self._publish(path)
        return found.loss

    def _publish(self, path: int) -> None:
        """Upload the weights that the model has now as those of a path."""
        outputs = self.member.outputs
        file: Path = outputs.directory / weights_name(path)
        about = {
            **self.built.about, "path": str(path), "modules": json.dumps(self.layout.modules),
            "step": str(self.task.step), "round": str(self.task.round),
        }  # fmt: skip
        save_weights(file, self.built.model.state_dict(), about=about)
        if outputs.publish is not None:
            outputs.publish(file, file.name)

    # ----------------------------------------------------------------------------- the end

    def _ended(self, reason: str) -> dict[str, Any]:
        """Write and return this member's part of the summary."""
        slot = slot_of(self.member.name)
        result = run_result(
            member=self.member.name, slot=slot, seed=self.spec.job.seed, reason=reason,
            totals=self.totals,
        )  # fmt: skip
        result |= {
            "steps": self.task.step, "tokens": self.task.tokens, "rounds": self._done,
            "parameters": self.task.num_parameters,
            "tokens_per_s": self.task.tokens / self.totals.wall_s if self.totals.wall_s else 0.0,
            "data_digest": self.built.dataset.digest,
            "modules": {str(m): digest for m, digest in self.modules.digests().items()},
            "module_rounds": {str(m): rounds for m, rounds in self.modules.held().items()},
        }  # fmt: skip
        path = self.member.outputs.directory / "result.json"
        with suppress(OSError):
            path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8", newline="\n")
        return result
