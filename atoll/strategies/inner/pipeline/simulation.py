"""Simulates one batch in a pipeline, event by event. No torch.

Unlike the closed forms of `options.py` it allows unequal stages, machines whose ranks share cores,
transfers that take time and share a link, and two parts of Varuna (Athlur et al.,
https://arxiv.org/abs/2111.04007): the opportunistic order of passes, and, only here, `early`: a
stage recomputes activations before their gradient arrives, and meanwhile runs a ready forward pass.

Cores and links are shared fluidly: n passes on c cores run at min(1, c/n) of their speed, or at a
measured one, and k transfers over one link at 1/k of its bandwidth. A transfer also costs both
sides processor time, which is part of the passes before and after it.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from atoll.errors import ConfigError
from atoll.strategies.inner.options import ONE_EACH, OPPORTUNISTIC, PipelineShape, Work
from atoll.strategies.inner.pipeline.hosts import Hosts
from atoll.strategies.inner.pipeline.order import next_pass


class Kind(StrEnum):
    """What a rank computes."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Task:
    """One pass of a microbatch through a stage."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def forward(self) -> bool:
        """Whether it is a forward pass."""
        return self.kind == Kind.FORWARD


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """One microbatch on every stage, at speed 1."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    """Without recomputation."""
    recompute_s: Sequence[float] = ()
    """Empty: activations are kept."""
    sent_bytes: Sequence[float] = ()
    """From each stage to the next, and as much back; empty: nothing."""

    def of(self, task: Task) -> float:
        """Return the time of a task."""
        by_kind = {
            Kind.FORWARD: self.forward_s,
            Kind.RECOMPUTE: self.recompute_s,
            Kind.BACKWARD: self.backward_s,
        }
        return by_kind[task.kind][task.stage]

    def sent(self, boundary: int) -> float:
        """Return the bytes between stage `boundary` and the next."""
        return self.sent_bytes[boundary] if self.sent_bytes else 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of a simulated batch."""

    wall_s: float
    """From the first forward to the last backward pass."""
    busy_s: tuple[float, ...]
    """Time in which each rank computes, or waits for a shared core."""
    held: tuple[int, ...]
    """Most inputs of stages kept at one time, by rank."""
    done: tuple[tuple[Task, ...], ...]
    """What each rank computed, in order."""

    @property
    def bubble(self) -> float:
        """Mean idle share of a rank's time."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s)


def simulate(
    shape: PipelineShape,
    times: StageTimes,
    *,
    microbatches: int,
    hosts: Hosts | None = None,
    early: bool = False,
) -> Simulated:
    """Simulate one batch of all rows of a pipeline, without the all-reduce between rows.

    With `early` a stage recomputes before the gradient arrives; real pipelines do not.

    Raises:
        ConfigError: the schedule does not exist for so many microbatches, or is not 1f1b although
            `early`, or the ranks do not make whole rows.
    """
    hosts = hosts or Hosts()
    of_rank = hosts.of_rank or (0,) * shape.ranks
    if early and shape.schedule != ONE_EACH:
        raise ConfigError(
            "only one schedule recomputes before the gradient arrives",
            given=f"schedule = {shape.schedule!r}", expected=repr(ONE_EACH),
        )  # fmt: skip
    if not shape.works_with(microbatches) or len(of_rank) % shape.ranks:
        raise ConfigError(
            "this pipeline does not exist",
            given=f"{len(of_rank)} ranks in rows of {shape.ranks}, {microbatches} microbatches",
            expected="whole rows, and as many microbatches as the schedule needs",
        )
    ranks = [
        _Rank(shape, times, number % shape.ranks, microbatches, early=early)
        for number in range(len(of_rank))
    ]
    run = _Run(shape, times, hosts, of_rank, ranks)
    wall_s = run.to_end()
    return Simulated(
        wall_s,
        tuple(rank.busy_s for rank in ranks),
        tuple(rank.most for rank in ranks),
        tuple(tuple(rank.done) for rank in ranks),
    )


class _Rank:
    """One rank: what it still has to do, in the order of its schedule."""

    def __init__(
        self,
        shape: PipelineShape,
        times: StageTimes,
        number: int,
        microbatches: int,
        *,
        early: bool,
    ) -> None:
        self._last = shape.stages - 1
        greedy = shape.schedule == OPPORTUNISTIC
        self._most = shape.held(number, microbatches=microbatches) if greedy else 0
        """Inputs that an opportunistic rank may keep; 0: its order is fixed."""
        self._apart = early
        """Recomputation is a task of its own, which needs no gradient."""
        self._recomputed = bool(times.recompute_s)
        self.left = deque(
            task
            for work in shape.order(number, microbatches=microbatches)
            for task in self._tasks(work)
        )
        self.arrived: set[Task] = set()
        """Tasks for which the input, or the gradient, is here."""
        self.done: list[Task] = []
        self.now: Task | None = None
        self.busy_s = 0.0
        self.held = self.most = 0
        if number == 0:
            self.arrived.update(Task(Kind.FORWARD, 0, m) for m in range(microbatches))

    def _tasks(self, work: Work) -> list[Task]:
        kind = Kind.FORWARD if work.forward else Kind.BACKWARD
        task = Task(kind, work.stage, work.microbatch)
        if self._apart and self._recomputed and not work.forward and work.stage < self._last:
            return [Task(Kind.RECOMPUTE, work.stage, work.microbatch), task]
        return [task]

    def takes_s(self, task: Task, times: StageTimes) -> float:
        """Return the time of a task, with the recomputation that it begins with."""
        first = Task(Kind.RECOMPUTE, task.stage, task.microbatch)
        with_it = task.kind == Kind.BACKWARD and self._recomputed and not self._apart
        return times.of(task) + (times.of(first) if with_it else 0.0)

    def next(self) -> Task | None:
        """Return the task to begin now, and take it from what is left; None: wait."""
        if not self.left:
            return None
        if self._most:
            found = next_pass(self.left, ready=self.arrived, held=self.held, most=self._most)
            if found is not None:
                self.left.remove(found)
            return found
        task = self.left[0]
        gradient = Task(Kind.BACKWARD, task.stage, task.microbatch)
        if self._apart and task.kind != Kind.FORWARD and gradient not in self.arrived:
            again = self.done and self.done[-1].kind == Kind.RECOMPUTE
            ahead = None if again else self._forward()
            if ahead is not None:
                self.left.remove(ahead)
                return ahead
        if task.kind != Kind.RECOMPUTE and task not in self.arrived:
            return None
        return self.left.popleft()

    def _forward(self) -> Task | None:
        """Return the next forward pass if its input is here."""
        task = next((task for task in self.left if task.kind == Kind.FORWARD), None)
        return task if task in self.arrived else None

    def end(self, task: Task) -> None:
        """Note that a task has ended."""
        self.now = None
        self.done.append(task)
        self.held += {Kind.FORWARD: 1, Kind.RECOMPUTE: 0, Kind.BACKWARD: -1}[task.kind]
        self.most = max(self.most, self.held)


@dataclass(slots=True, eq=False)
class _Amount:
    """What is left of a pass, in seconds at full speed, or of a transfer's latency or bytes."""

    left: float
    rate: float = 1.0


@dataclass(slots=True, eq=False)
class _Transfer:
    rank: int
    task: Task
    latency: _Amount
    nbytes: _Amount


class _Run:
    """The clock: what computes and what is on its way."""

    def __init__(
        self,
        shape: PipelineShape,
        times: StageTimes,
        hosts: Hosts,
        of_rank: tuple[int, ...],
        ranks: list[_Rank],
    ) -> None:
        self._shape, self._times, self._hosts = shape, times, hosts
        self._of_rank, self._ranks = of_rank, ranks
        self._passes: dict[int, _Amount] = {}
        self._waiting: defaultdict[tuple[str, int], deque[_Transfer]] = defaultdict(deque)
        self._moving: defaultdict[tuple[str, int], list[_Transfer]] = defaultdict(list)

    def to_end(self) -> float:
        """Run until nothing is left; return the time."""
        now = 0.0
        self._begin()
        while self._passes or any(self._moving.values()):
            amounts = self._rated()
            step = min(amount.left / amount.rate for amount in amounts)
            # Those that end now end exactly, whatever rounding leaves of them.
            ends = [a for a in amounts if a.left / a.rate <= step * (1 + 1e-12)]
            for amount in amounts:
                amount.left -= step * amount.rate
            for amount in ends:
                amount.left = 0.0
            for number in self._passes:
                self._ranks[number].busy_s += step
            now += step
            self._end()
            self._begin()
        return now

    def _rated(self) -> list[_Amount]:
        """Set the rate of everything that moves, and return it."""
        computing: defaultdict[int, int] = defaultdict(int)
        for number in self._passes:
            computing[self._of_rank[number]] += 1
        found = []
        for number, amount in self._passes.items():
            host = self._hosts.hosts[self._of_rank[number]]
            amount.rate = host.rate(computing[self._of_rank[number]])
            found.append(amount)
        for (kind, _), moving in self._moving.items():
            link = self._hosts.near if kind == "near" else self._hosts.far
            sending = sum(transfer.latency.left == 0 for transfer in moving)
            for transfer in moving:
                if transfer.latency.left > 0:
                    found.append(transfer.latency)
                else:
                    transfer.nbytes.rate = link.bytes_per_s / sending
                    found.append(transfer.nbytes)
        return found

    def _end(self) -> None:
        for number in [n for n, amount in self._passes.items() if amount.left == 0]:
            del self._passes[number]
            self._ended(number)
        for moving in self._moving.values():
            for transfer in [t for t in moving if t.latency.left == 0 and t.nbytes.left == 0]:
                moving.remove(transfer)
                self._ranks[transfer.rank].arrived.add(transfer.task)

    def _ended(self, number: int) -> None:
        """Pass on what a rank has computed."""
        rank = self._ranks[number]
        task = rank.now
        assert task is not None
        rank.end(task)
        stage, microbatch = task.stage, task.microbatch
        if task.kind == Kind.FORWARD and stage == self._shape.stages - 1:
            rank.arrived.add(Task(Kind.BACKWARD, stage, microbatch))
        elif task.kind == Kind.FORWARD:
            self._send(number, Task(Kind.FORWARD, stage + 1, microbatch), boundary=stage)
        elif task.kind == Kind.BACKWARD and stage:
            self._send(number, Task(Kind.BACKWARD, stage - 1, microbatch), boundary=stage - 1)

    def _peer(self, number: int, stage: int) -> tuple[int, bool]:
        """Return the rank with a stage of a rank's row, and whether it is on the same host."""
        peer = number - number % self._shape.ranks + stage % self._shape.ranks
        return peer, self._of_rank[number] == self._of_rank[peer]

    def _transfers_s(self, number: int, task: Task) -> float:
        """Return the processor time of what a task receives and sends."""
        if task.kind == Kind.RECOMPUTE:
            return 0.0
        total = 0.0
        for stage in (task.stage - 1, task.stage + 1):
            if 0 <= stage < self._shape.stages:
                peer, near = self._peer(number, stage)
                link = self._hosts.near if near else self._hosts.far
                nbytes = self._times.sent(min(stage, task.stage))
                total += link.busy(nbytes) if peer != number else 0.0
        return total

    def _send(self, sender: int, task: Task, *, boundary: int) -> None:
        receiver, near = self._peer(sender, task.stage)
        link = self._hosts.near if near else self._hosts.far
        nbytes = self._times.sent(boundary) if link.bytes_per_s < math.inf else 0.0
        if receiver == sender or (nbytes == 0 and link.latency_s == 0):
            self._ranks[receiver].arrived.add(task)
            return
        key = ("near", sender) if near else ("far", self._of_rank[sender])
        transfer = _Transfer(receiver, task, _Amount(link.latency_s), _Amount(nbytes))
        self._waiting[key].append(transfer)

    def _begin(self) -> None:
        """Begin every task and transfer that can begin; tasks without time end at once."""
        again = True
        while again:
            again = False
            for number, rank in enumerate(self._ranks):
                while rank.now is None and (task := rank.next()) is not None:
                    rank.now = task
                    seconds = rank.takes_s(task, self._times) + self._transfers_s(number, task)
                    if seconds > 0:
                        self._passes[number] = _Amount(seconds)
                    else:
                        self._ended(number)
                        again = True
        for (kind, number), waiting in self._waiting.items():
            link = self._hosts.near if kind == "near" else self._hosts.far
            moving = self._moving[kind, number]
            while waiting and len(moving) < link.concurrent:
                moving.append(waiting.popleft())
