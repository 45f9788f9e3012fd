"""One run: members as threads of this process, with the parts that workers use."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from atoll.codec import make_codec
from atoll.config import StrategyTable
from atoll.devices.choose import device_of_model
from atoll.devices.transfer import placed
from atoll.group.base import Group
from atoll.group.in_process.groups import MemoryGroups
from atoll.group.single import SingleGroup as GroupOfOne
from atoll.strategies.base import SyncResult
from atoll.strategies.inner.local import Local, language_model_loss
from atoll.strategies.resolve import Resolved, resolve
from atoll.task import Task
from atoll.train.batches import MemberStream
from atoll.train.evaluate import evaluate
from atoll.train.optim.optimizers import StepSchedule, build_optimizer, learning_rate
from bench.methods.rows import Row
from bench.methods.setting import Model, Setting
from tests.reference.algorithms import flat

LONGEST_RUN_S = 4 * 3600.0


@dataclass
class Outcome:
    """What one member's run came to."""

    model: Model
    loss: float = float("nan")
    accuracy: float | None = None
    """Of a classifier."""
    exchanges: Counter[tuple[int, int]] = field(default_factory=Counter)
    """(bytes sent, bytes received) of a round -> how many such rounds."""
    peak_bytes: int = 0
    """Sent in the largest round; the last one, for what remains, does not count."""
    rounds: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """Step -> parameters, where a caller wants to compare them."""

    def note(self, moved: tuple[int, int], *, last: bool = False) -> None:
        """Count the bytes of one exchange, if there was one."""
        if any(moved):
            self.exchanges[moved] += 1
            self.peak_bytes = max(self.peak_bytes, 0 if last else moved[0])


class Counted:
    """What a group's counters moved from one look to the next.

    Where rounds go on beside training, counters move at any time: there it is the rounds' results
    that say what each moved.
    """

    def __init__(self, group: Group, *, overlapped: bool) -> None:
        """Count from here."""
        self._group, self._overlapped = group, overlapped
        self._before = group.sent_bytes, group.received_bytes

    def look(self, result: SyncResult | None) -> tuple[int, int]:
        """Return bytes sent and received since the last look."""
        if self._overlapped:
            return (result.sent_bytes, result.received_bytes) if result is not None else (0, 0)
        now, before = (self._group.sent_bytes, self._group.received_bytes), self._before
        self._before = now
        return now[0] - before[0], now[1] - before[1]


@dataclass(frozen=True)
class Trial:
    """A row with a seed and a number of members."""

    row: Row
    members: int
    seed: int
    setting: Setting

    @property
    def name(self) -> str:
        """Return what people read of it."""
        rate = f"rate {self.setting.lr:g}"
        return f"{self.row.name}, {self.members} members, seed {self.seed}, {rate}"

    def resolved(self) -> Resolved:
        """Return the strategy that the row means."""
        options = dict(self.row.options)
        if "shared_steps" in options:
            options["shared_steps"] = min(options["shared_steps"], self.setting.steps // 10)
        table = StrategyTable(preset=self.row.preset, codec=self.row.codec, options=options)
        return resolve(table, steps=self.setting.steps)

    def options(self) -> dict[str, Any]:
        """Return all options of the outer strategy."""
        return dataclasses.asdict(self.resolved().method)  # type: ignore[call-overload, no-any-return]


def run(trial: Trial) -> dict[str, Any]:
    """Train and return the record of a run: plain values."""
    began = time.perf_counter()
    outcomes = train(trial)
    first, setting = outcomes[0], trial.setting
    last = flat(first.model)
    resolved = trial.resolved()
    return {
        "row": trial.row.name,
        "strategy": trial.row.preset,
        "codec": resolved.codec,
        "members": trial.members,
        "seed": trial.seed,
        "steps": setting.steps,
        "scale": setting.scale,
        "parameters": last.numel(),
        "tokens_per_node": setting.tokens_per_node,
        "loss": first.loss,
        "accuracy": first.accuracy,
        "sent_bytes": max(outcome.sent_bytes for outcome in outcomes),
        "received_bytes": max(outcome.received_bytes for outcome in outcomes),
        "peak_bytes": max(outcome.peak_bytes for outcome in outcomes),
        "rounds": first.rounds,
        "exchanges": [[*nbytes, count] for nbytes, count in sorted(first.exchanges.items())],
        "identical": all(torch.equal(flat(other.model), last) for other in outcomes[1:]),
        "seconds": round(time.perf_counter() - began, 1),
    }


def train(trial: Trial, *, keep: frozenset[int] = frozenset(), evaluated: bool = True) -> list[Any]:
    """Train all members of a trial and return their outcomes in member order."""
    options = trial.resolved().method
    model = trial.setting.model(trial.seed).to(trial.setting.device)
    bodies = [copy.deepcopy(model) for _ in range(trial.members)]

    def body(group: Group) -> Outcome:
        slot = int(group.me[1:])
        return _member(trial, options, group, bodies[slot], keep=keep, evaluated=evaluated)

    if trial.members == 1:
        return [body(GroupOfOne())]
    groups = MemoryGroups(trial.members, timeout_s=LONGEST_RUN_S)
    speeds = {f"w{slot}": speed for slot, speed in enumerate(trial.setting.speeds)}
    groups.coordinator.servers.speeds.update(speeds)
    return groups.together(body, timeout_s=LONGEST_RUN_S)


def _member(
    trial: Trial,
    options: Any,
    group: Group,
    model: Model,
    *,
    keep: frozenset[int],
    evaluated: bool,
) -> Outcome:
    """Train one member."""
    setting, slot = trial.setting, int(group.me[1:])
    table = setting.table(trial.row.train)
    optimizer = build_optimizer(model, table)
    schedule = StepSchedule(optimizer, learning_rate(table))
    task = Task(model, optimizer, schedule, member=group.me, last=table.steps)
    outer, outcome = options.build(), Outcome(model)
    outer.setup(task, group=group, codec=make_codec(trial.resolved().codec))
    outer.begin(task)
    counted = Counted(group, overlapped=trial.row.overlap_steps > 0)
    shards = setting.shards(trial.seed, trial.members)
    stream = MemberStream(shards, slot=slot, batch=table.batch, shared_steps=outer.shared_steps)
    inner = Local(language_model_loss, clip=table.clip)
    device = device_of_model(model)
    while task.step < table.steps:
        outcome.note(counted.look(inner.step(task, placed(next(stream), device), outer).sync))
        if task.step in keep and slot == 0:
            outcome.kept[task.step] = flat(model)
    outcome.note(counted.look(outer.finish(task)), last=True)
    outcome.rounds = task.round
    outcome.sent_bytes, outcome.received_bytes = group.sent_bytes, group.received_bytes
    if slot == 0 and evaluated:
        with outer.evaluating(task):
            found = evaluate(model, setting.held_out(), limit_tokens=setting.held_out_tokens)
        outcome.loss, outcome.accuracy = found.loss, found.accuracy
    return outcome


def shortened(trial: Trial, steps: int) -> Trial:
    """Return a trial of fewer steps, for comparisons."""
    return dataclasses.replace(trial, setting=dataclasses.replace(trial.setting, steps=steps))
