"""The microbatches at one member: compute what arrives, and send the result on.

Everything here runs on the member's own thread: arrivals wait in its queue, and what is sent ends
on a thread of the channel, which only puts an event into that queue.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, PeerRefused, WireError
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.activations import ActivationCodec, TensorHead
from atoll.strategies.inner.swarm.evaluating import hidden_of, measured
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.wire.malformed import MALFORMED
from atoll.wire.swarm import (
    Backward,
    Broken,
    Forward,
    Handed,
    HeldOutSum,
    Holder,
    Release,
    Resume,
    Work,
    pack_head,
)

log = logging.getLogger(__name__)

SEND_S = 60.0
"""Time limit of handing a microbatch to the next member."""
MISFITS = (RuntimeError, ValueError, TypeError, IndexError)
"""What the modules of a stage raise on inputs of a wrong shape or type."""
MOST_MISFITS = 16
"""A stage that has computed nothing yet fails with its own error after so many of them."""

Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns inputs and targets of a microbatch: a pure function of step and index. Those above the
step's are held out."""
Report = Handed | Broken
_heads = msgspec.msgpack.Decoder(list[TensorHead])


_Form = tuple[tuple[torch.Size, torch.dtype], ...]


@dataclass(frozen=True, slots=True)
class ReportTo:
    """An event: something ended that the driver of this microbatch has to know."""

    driver: Holder
    report: Report


@dataclass(frozen=True, slots=True)
class _Task:
    work: Work
    backward: bool
    tensors: tuple[Tensor | None, ...] | None
    """Inputs or gradients; None: the inputs that are kept, or those of the data."""


@dataclass(slots=True)
class Effort:
    """What a member has done since its process began, whatever stage it served."""

    busy_s: float = 0.0
    """Seconds of computing."""
    evaluation_s: float = 0.0
    """Part of it: forward passes on held-out rows."""
    sent_bytes: int = 0
    """Of activations and their gradients, as is `received_bytes`."""
    received_bytes: int = 0


@dataclass(slots=True)
class StageWork:
    """See the module's docstring."""

    runner: StageRunner
    holder: Holder
    """This member, at its present epoch."""
    channel: PeerChannel
    codec: ActivationCodec
    rows: Rows
    event: Callable[[ReportTo], None]
    """Takes an event, from any thread."""
    clock: Clock = field(default_factory=RealClock)
    effort: Effort = field(default_factory=Effort)
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
    """Surrounds an evaluation, see `Trained.evaluating`."""
    _tasks: deque[_Task] = field(default_factory=deque)
    _attempts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step and newest attempt by lease."""
    _fitted: _Form = ()
    """Form of the last inputs from another member that were computed."""
    _misfits: int = 0
    """Inputs that could not be computed, before the first that could."""

    @property
    def stage(self) -> int:
        """The stage that is served."""
        return self.runner.stage.number

    @property
    def waiting(self) -> int:
        """Microbatches that wait to be computed."""
        return len(self._tasks)

    # ---------------------------------------------------------------------- arrivals

    def begin(self, work: Work) -> None:
        """Compute the first stage of an own microbatch."""
        self._enqueue(_Task(work, False, None))

    def arrived(self, head: Forward | Backward, mail: PeerMail) -> None:
        """Take activations or their gradients from another member."""
        self.effort.received_bytes += len(mail.data)
        try:
            size = head.sizes[0] if head.sizes else 0
            table = _heads.decode(mail.data[:size])
            tensors = self.codec.decode(table, mail.data[size:])
        except (WireError, *MALFORMED) as error:
            self._broken(head.work, self.stage, error)
            return
        self._enqueue(_Task(head.work, isinstance(head, Backward), tensors))

    def resume(self, order: Resume) -> None:
        """Compute the kept input again, for another path."""
        self._enqueue(_Task(order.work, False, None))

    def release(self, order: Release) -> None:
        """Free the inputs of a microbatch; with `drop` its pending gradients, too."""
        self._attempts.pop(order.lease, None)
        key = MicrobatchKey(order.step, order.index, order.lease)
        if order.drop:
            self.runner.drop(key)
        else:
            self.runner.release(key)

    def clear(self) -> None:
        """Drop all work."""
        self._tasks.clear()
        self._attempts.clear()

    def begin_step(self, step: int) -> None:
        """Drop the work of steps before this one."""
        self._tasks = deque(task for task in self._tasks if task.work.step >= step)
        self._attempts = {n: known for n, known in self._attempts.items() if known[0] >= step}

    def _overtaken(self, work: Work) -> bool:
        return work.attempt < self._attempts.get(work.lease, (0, 0))[1]

    def _enqueue(self, task: _Task) -> None:
        work = task.work
        place = work.path[self.stage] if self.stage < len(work.path) else None
        if place != self.holder or not self.runner.takes(work.step, work.index):
            refusal = PeerRefused("this member is at another step, or has announced itself again")
            self._broken(work, self.stage, refusal)
        elif not self._overtaken(work):
            self._attempts[work.lease] = work.step, work.attempt
            self._tasks.append(task)

    # --------------------------------------------------------------------- computing

    def compute(self) -> bool:
        """Compute the oldest microbatch that waits; return whether there was one."""
        if not self._tasks:
            return False
        task = self._tasks.popleft()
        if self._overtaken(task.work):
            return True
        began = self.clock.monotonic()
        found: Sequence[Tensor | None]
        held_out: HeldOutSum | None = None
        try:
            if task.work.evaluates:
                with self._refusing_misfits(task):
                    (found, held_out), back = self._evaluate(task), False
            elif task.backward:
                found, back = self._backward(task), True
            else:
                with self._refusing_misfits(task):
                    found, back = self._forward(task)
        except PeerRefused as error:
            self._broken(task.work, self.stage, error)
            return True
        work, seconds = task.work, self.clock.monotonic() - began
        self.effort.busy_s += seconds
        self.effort.evaluation_s += seconds if work.evaluates else 0.0
        report = Handed(
            work.step, work.index, work.lease, work.attempt, self.stage, back, seconds=seconds,
            queue=self.waiting, held_out=held_out,
        )  # fmt: skip
        ends = held_out is not None or (back and self.stage <= min(work.stages))
        if ends:
            self.event(ReportTo(work.path[0], report))
        else:
            self._pass_on(work, found, report)
        return True

    @contextmanager
    def _refusing_misfits(self, task: _Task) -> Iterator[None]:
        """Refuse inputs from another member that the stage cannot compute.

        An error is the stage's own if inputs of this form were computed before, or if memory is
        exhausted.
        """
        form = tuple((t.shape, t.dtype) for t in task.tensors or () if t is not None)
        try:
            yield
        except MISFITS as error:
            own = form in ((), self._fitted) or isinstance(error, torch.OutOfMemoryError)
            self._misfits += not self._fitted
            if own or self._misfits >= MOST_MISFITS:
                raise
            log.warning("inputs of a microbatch were refused: %s", error, exc_info=True)
            self.runner.drop(key_of(task.work))
            raise PeerRefused(
                f"stage {self.stage} cannot compute the inputs of a microbatch",
                given=" and ".join(f"{kind} {tuple(shape)}" for shape, kind in form),
                expected=" and ".join(f"{kind} {tuple(shape)}" for shape, kind in self._fitted)
                or None,
            ) from error
        self._fitted = form or self._fitted

    def _evaluate(self, task: _Task) -> tuple[Sequence[Tensor], HeldOutSum | None]:
        """Return the outputs, or of the last stage what it measured; nothing is kept."""
        work, stage = task.work, self.runner.stage
        self._enter(work)
        rows = self.rows(work.step, work.index)
        inputs = (rows[0],) if stage.first else _all(task.tensors or (None,))
        with self.evaluating():
            if not stage.last:
                return hidden_of(stage, inputs), None
            return (), measured(stage, inputs, rows[1])

    def _forward(self, task: _Task) -> tuple[Sequence[Tensor | None], bool]:
        """Return the outputs, or of the last stage the inputs' gradients and True."""
        work, runner, key = task.work, self.runner, key_of(task.work)
        self._enter(work)
        if task.tensors is not None:
            inputs = _all(task.tensors)
        elif runner.stage.first:
            inputs = (self.rows(work.step, work.index)[0],)
        else:
            inputs = runner.inputs(key)
        if not runner.stage.last:
            return runner.forward(key, inputs), False
        targets = self.rows(work.step, work.index)[1]
        counted = self.stage in work.stages
        return runner.loss(key, inputs, targets, counted=counted)[1], True

    def _backward(self, task: _Task) -> Sequence[Tensor | None]:
        self._enter(task.work)
        counted = self.stage in task.work.stages
        return self.runner.backward(key_of(task.work), task.tensors or (), counted=counted)

    def _enter(self, work: Work) -> None:
        """Give the stage the microbatch's tokens, if it packs activations by them."""
        if self.runner.stage.cut.size:
            self.runner.stage.enter(self.rows(work.step, work.index)[0])

    def _pass_on(self, work: Work, tensors: Sequence[Tensor | None], report: Handed) -> None:
        """Send a result to the next member of the path, then report it to the driver."""
        driver, event, backward = work.path[0], self.event, report.backward
        to = self.stage + (-1 if backward else 1)
        # Positions of random codecs differ by microbatch.
        number = work.step * 65_536 + work.index
        heads, data = self.codec.encode(tensors, number=number)
        table = msgspec.msgpack.encode(heads)
        self.effort.sent_bytes += len(table) + sum(memoryview(part).nbytes for part in data)
        sizes, rows = [len(table), *(head.nbytes for head in heads)], heads[0].shape[:1]
        kind = Backward if backward else Forward
        head = pack_head(kind(work, to, self.codec.spec, rows, sizes))
        done = self.channel.send(work.path[to].member, head, [table, *data], timeout_s=SEND_S)
        done.add_done_callback(
            lambda ended: event(
                ReportTo(driver, _broken(work, to, error))
                if (error := ended.exception()) is not None
                else ReportTo(driver, report)
            )
        )

    def _broken(self, work: Work, stage: int, error: BaseException) -> None:
        self.event(ReportTo(work.path[0], _broken(work, stage, error)))


def key_of(work: Work) -> MicrobatchKey:
    """Return the key under which inputs and pending gradients are held."""
    return MicrobatchKey(work.step, work.index, work.lease)


def _broken(work: Work, stage: int, error: BaseException) -> Broken:
    busy = isinstance(error, PeerRefused)
    reason = error.message() if isinstance(error, AtollError) else str(error)
    return Broken(work.step, work.index, work.lease, work.attempt, stage, reason, busy=busy)


def _all(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    found = tuple(tensor for tensor in tensors if tensor is not None)
    if len(found) != len(tensors):
        raise PeerRefused("an input of a stage is missing", given=f"{len(found)} tensors")
    return found
