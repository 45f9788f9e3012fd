"""The microbatches at one member: compute what arrives, and send the result on.

Everything here runs on the member's own thread: arrivals wait in its queue, and what is sent ends
on a thread of the channel, which only puts an event into that queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from atoll.clock import Clock, RealClock
from atoll.errors import AtollError, PeerRefused, WireError
from atoll.group.peers.channel import PeerChannel, PeerMail
from atoll.strategies.inner.swarm.activations import ActivationCodec, TensorHead
from atoll.strategies.inner.swarm.runner import MicrobatchKey, StageRunner
from atoll.wire.malformed import MALFORMED
from atoll.wire.swarm import (
    Backward,
    Broken,
    Forward,
    Handed,
    Holder,
    Release,
    Resume,
    Work,
    pack_head,
)

SEND_S = 60.0
"""Time limit of handing a microbatch to the next member."""

Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns inputs and targets of a microbatch: a pure function of step and index."""
Report = Handed | Broken
_heads = msgspec.msgpack.Decoder(list[TensorHead])


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
    _tasks: deque[_Task] = field(default_factory=deque)
    _attempts: dict[int, int] = field(default_factory=dict)
    """Newest attempt by lease."""

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
        """Activations or their gradients came from another member."""
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
        """The step is over, or everything is dropped."""
        self._tasks.clear()
        self._attempts.clear()

    def _enqueue(self, task: _Task) -> None:
        work = task.work
        place = work.path[self.stage] if self.stage < len(work.path) else None
        if place != self.holder or work.step != self.runner.step:
            refusal = PeerRefused("this member is at another step, or has announced itself again")
            self._broken(work, self.stage, refusal)
        elif work.attempt >= self._attempts.get(work.lease, 0):
            self._attempts[work.lease] = work.attempt
            self._tasks.append(task)

    # --------------------------------------------------------------------- computing

    def compute(self) -> bool:
        """Compute the oldest microbatch that waits; return whether there was one."""
        if not self._tasks:
            return False
        task = self._tasks.popleft()
        if task.work.attempt < self._attempts.get(task.work.lease, 0):
            return True
        began = self.clock.monotonic()
        try:
            if task.backward:
                found, back = self._backward(task), True
            else:
                found, back = self._forward(task)
        except PeerRefused as error:
            self._broken(task.work, self.stage, error)
            return True
        self._pass_on(task.work, found, backward=back, seconds=self.clock.monotonic() - began)
        return True

    def _forward(self, task: _Task) -> tuple[Sequence[Tensor | None], bool]:
        """Return the outputs, or of the last stage the inputs' gradients and True."""
        work, runner, key = task.work, self.runner, key_of(task.work)
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
        counted = self.stage in task.work.stages
        return self.runner.backward(key_of(task.work), task.tensors or (), counted=counted)

    def _pass_on(
        self, work: Work, tensors: Sequence[Tensor | None], *, backward: bool, seconds: float
    ) -> None:
        """Send a result to the next member of the path, then report it to the driver."""
        report = Handed(
            work.step, work.index, work.lease, work.attempt, self.stage, backward,
            seconds=seconds, queue=self.waiting,
        )  # fmt: skip
        driver, event = work.path[0], self.event
        if backward and self.stage <= min(work.stages):
            event(ReportTo(driver, report))  # the way back ends here
            return
        to = self.stage + (-1 if backward else 1)
        # Positions of random codecs differ by microbatch.
        number = work.step * 65_536 + work.index
        heads, data = self.codec.encode(tensors, number=number)
        table = msgspec.msgpack.encode(heads)
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
