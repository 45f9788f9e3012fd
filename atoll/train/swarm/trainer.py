"""The built-in trainer as a member of a SWARM: serves a stage, and reports what it did.

Start reading at `member.py`, which is the training itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from atoll.clock import RealClock
from atoll.config import JobSpec
from atoll.devices.choose import CPU, choose
from atoll.devices.errors import device_errors
from atoll.devices.facts import memory
from atoll.group.base import Group
from atoll.group.peers.channel import PeerChannel
from atoll.strategies.compatibility import check_job
from atoll.strategies.inner.swarm.runner import StepSum
from atoll.strategies.inner.swarm.stage import ModelStage, StageCut
from atoll.strategies.resolve import Resolved
from atoll.strategies.vectors.whole_state import report_on
from atoll.task import Task
from atoll.train.computing import options_on
from atoll.train.join_job import JoinedJob
from atoll.train.out_of_memory import memory_errors
from atoll.train.results.metrics import REPORT_EVERY_S, Recorder, Totals
from atoll.train.results.outputs import Outputs
from atoll.train.results.result import run_result
from atoll.train.swarm.build import JobStages, TrainedStage
from atoll.train.swarm.member import SwarmMember
from atoll.train.swarm.outer import StageOuter
from atoll.train.swarm.parts import SwarmJob
from atoll.train.swarm.rounds import StageRounds
from atoll.train.swarm.states import JobStates

LEFT = "this process was asked to stop"
STOPPED = "the job was asked to stop"


@dataclass(slots=True)
class Progress:
    """Where a member is, whatever stage it serves."""

    member: str
    step: int = 0
    round: int = 0
    tokens: int = 0
    """On the last stage only: on every other one the same tokens would count again."""


class SwarmTrainer:
    """One member's SWARM, and its outputs."""

    def __init__(
        self, spec: JobSpec, enrolled: JoinedJob, *, channel: PeerChannel, outputs: Outputs,
        should_stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Build what does not depend on the stage; `channel` reaches the other members.

        Raises:
            ConfigError: the job cannot be trained like that.
            DataError: the text is missing or too small.
        """
        resolved = check_job(spec)
        if spec.job.threads:
            torch.set_num_threads(spec.job.threads)
        self._spec, self._enrolled, self._outputs = spec, enrolled, outputs
        self._clock, self._should_stop = RealClock(), should_stop
        self._began = self._clock.monotonic()
        connection, swarm = enrolled.connection, spec.swarm
        self._group, me = connection.group, connection.group.me
        self._group.aggregation = resolved.aggregation
        device = choose(spec.job.device)
        precision = options_on(spec, device).precision
        cut = StageCut(stages=swarm.stages, cuts=tuple(swarm.cuts), precision=precision)
        self._states = JobStates.of(enrolled, should_stop=should_stop)
        agrees = spec.meets_every_step
        self._stages = JobStages(
            spec, cut, member=me, device=device, states=self._states,
            outer=None if agrees else partial(_outer_of, resolved, self._group),
        )  # fmt: skip
        rows = self._stages.rows(swarm.microbatches)
        job = SwarmJob(
            stages=swarm.stages, steps=spec.train.steps, rows=rows,
            rows_each=spec.train.batch // swarm.microbatches, codec=swarm.codec,
            early=swarm.early_microbatches, agrees=agrees, seed=spec.job.seed,
            free_bytes=_free_bytes(device),
        )  # fmt: skip
        self._rounds = StageRounds(self._group, codec=resolved.codec, rows=spec.train.batch)
        self.member = SwarmMember(
            me, job, channel=channel, ask=connection.link.request, rounds=self._rounds,
            stages=self._stages,
        )  # fmt: skip
        self.member.on_step = self._stepped
        self._progress, self._totals = Progress(me), Totals()
        self._recorder = Recorder(
            self._progress, clock=self._clock, path=outputs.directory / "metrics.jsonl",
            report=outputs.report, announce=outputs.announce,
        )  # fmt: skip
        self._since = StepSum(0, 0.0)
        """What was folded since the last point."""
        self._last = StepSum(0, 0.0)
        """What was folded in the last step."""
        self._reported_s = self._busy_s = 0.0

    def train(self) -> dict[str, Any]:
        """Train to the end or to a stop; return this member's part of the summary.

        Raises:
            LossNotFinite: the loss or a gradient is not finite; nothing was updated.
            OutOfMemory: this machine's memory does not suffice.
            GroupError: the members cannot agree any more.
        """
        self._recorder.process_began(self._totals)
        try:
            with memory_errors(member=self.member.me), device_errors():
                self.member.run(self._should_stop)
                self._report()
                return self._ended()
        finally:
            self._rounds.close()
            self._states.close()
            self._recorder.close()

    # ----------------------------------------------------------------------- measurements

    def _stepped(self, total: StepSum) -> None:
        progress, before = self._progress, self._since
        if self._trained.runner.stage.last:
            progress.tokens += total.rows * self._stages.tokens_of_a_row
        rows = before.rows + total.rows
        loss = (before.loss * before.rows + total.loss * total.rows) / max(1, rows)
        self._since, self._last = StepSum(rows, loss), total
        if self._wall_s() - self._reported_s >= REPORT_EVERY_S:
            self._report()

    def _report(self) -> None:
        """Record one point of measurements."""
        wall_s, effort, totals, progress = (
            self._wall_s(),
            self.member.effort,
            self._totals,
            self._progress,
        )
        progress.step, progress.round = max(0, self.member.step), self._rounds_done()
        passed_s = wall_s - self._reported_s
        busy = (effort.busy_s - self._busy_s) / passed_s if passed_s > 0 else 0.0
        totals.wall_s, totals.compute_s = wall_s, effort.busy_s
        totals.evaluation_s = effort.evaluation_s
        totals.sent_bytes = float(self._group.sent_bytes + effort.sent_bytes)
        totals.received_bytes = float(self._group.received_bytes + effort.received_bytes)
        values = {
            "tokens": progress.tokens, "wall_s": wall_s, "compute_s": totals.compute_s,
            "sent_bytes": totals.sent_bytes, "received_bytes": totals.received_bytes,
            "busy": busy, "queue": self.member.waiting,
        }  # fmt: skip
        if self.member.trained is not None:
            stage = self._trained.runner.stage
            values |= {"stage": stage.number, "parameters": self._trained.task.num_parameters}
            values["lr"] = next(iter(self._trained.optimizer.param_groups))["lr"]
            if stage.last and self._since.rows:
                values["loss"], values["rows"] = self._since.loss, self._since.rows
                values["tokens_per_s"] = self._since.rows * self._stages.tokens_of_a_row / passed_s
        self._recorder.point(values)
        self._since, self._reported_s, self._busy_s = StepSum(0, 0.0), wall_s, effort.busy_s

    def _wall_s(self) -> float:
        return self._clock.monotonic() - self._began

    def _rounds_done(self) -> int:
        """Return the rounds of the stage's members: every step has one, or as their method says."""
        if self.member.trained is None:
            return 0
        return self.member.step if self.member.job.agrees else self._trained.task.round

    @property
    def _trained(self) -> TrainedStage:
        trained = self.member.trained
        if not isinstance(trained, TrainedStage):
            raise RuntimeError("this member serves no stage")
        return trained

    # ------------------------------------------------------------------------------ the end

    def _ended(self) -> dict[str, Any]:
        """Write and return this member's part of the summary."""
        member, totals, progress = self.member, self._totals, self._progress
        reason = ""
        if not member.finished or member.last < self._spec.train.steps:
            reason = STOPPED if member.finished else LEFT
        slot = self._enrolled.connection.registered.slot
        result = run_result(
            member=member.me, slot=slot, seed=self._spec.job.seed, reason=reason, totals=totals
        )
        result |= {
            "steps": progress.step, "tokens": progress.tokens, "rounds": progress.round,
            "tokens_per_s": progress.tokens / totals.wall_s if totals.wall_s > 0 else 0.0,
            "data_digest": self._stages.data_digest,
            "bytes_per_token": self._stages.bytes_per_token,
        }  # fmt: skip
        if member.trained is not None:
            stage = self._trained.runner.stage
            result |= {
                **report_on({**stage.parameters(), **stage.buffers()}), "stage": stage.number,
                "parameters": self._trained.task.num_parameters, "rows": self._last.rows,
            }  # fmt: skip
            if stage.last and self._last.rows:
                result["loss"] = self._last.loss
        path = self._outputs.directory / "result.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8", newline="\n")
        return result


def _outer_of(resolved: Resolved, group: Group, task: Task, stage: ModelStage) -> StageOuter:
    return StageOuter(resolved, group=group, task=task, stage=stage)


def _free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, of the machine if it is the processor."""
    return memory(device)[0] if device.type != CPU else int(psutil.virtual_memory().available)
