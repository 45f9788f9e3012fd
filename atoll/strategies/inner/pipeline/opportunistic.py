"""A real pipeline in opportunistic order: it does not wait while it could work; see `order.py`."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from typing import Any

import torch.distributed
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from atoll.devices.choose import CPU
from atoll.errors import ConfigError
from atoll.strategies.inner.options import PipelineShape, Work
from atoll.strategies.inner.pipeline.order import next_pass

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


class Arrivals:
    """Tracks which passes can begin; threads wait for the transfers that these need."""

    def __init__(self) -> None:
        self.here: set[Work] = set()
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def add(self, work: Work) -> None:
        """Note that a pass can begin; from any thread."""
        with self._changed:
            self.here.add(work)
            self._changed.notify()

    def expect(self, coming: list[tuple[Work, list[Any]]]) -> None:
        """Note passes when the transfers that each needs are complete, in order."""
        if not any(transfers for _, transfers in coming):
            self._await(coming)
            return
        threading.Thread(target=self._await, args=(coming,), name="arrivals", daemon=True).start()

    def _await(self, coming: list[tuple[Work, list[Any]]]) -> None:
        try:
            for work, transfers in coming:
                for transfer in transfers:
                    transfer.wait()
                self.add(work)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify()

    def next(self, left: deque[Work], *, held: int, most: int) -> Work:
        """Wait for a pass that can begin, and take it from those left; raises as transfers do."""
        with self._changed:
            while (work := next_pass(left, ready=self.here, held=held, most=most)) is None:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
        left.remove(work)
        return work


class Opportunistic(PipelineScheduleSingle):
    """A schedule for torch's stages, on processors: threads wait for the transfers of Gloo."""

    def __init__(self, stage: Any, n_microbatches: int, *, shape: PipelineShape, **options: Any):
        """See torch's schedules; raises ConfigError on an accelerator."""
        if stage.device.type != CPU:
            raise ConfigError(
                "an opportunistic pipeline waits for transfers of Gloo", given=str(stage.device),
                expected="processors", remedy='schedule = "1f1b" in [island]',
            )  # fmt: skip
        super().__init__(stage, n_microbatches, **options)
        self._shape = shape
        self.done: list[Work] = []
        """The passes of the last batch, in their order."""

    def _step_microbatches(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
    ) -> None:
        """Run one batch."""
        torch_own: Any = self  # its methods are not typed
        inputs, options = torch_own._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        target = target_mbs[0] if target_mbs is not None else None
        first = (inputs[0], options[0], target, loss_kwargs)
        # torch 2.6 prepares a stage once, and without targets.
        if not getattr(self, "_stage_initialized", False):
            wanted = len(inspect.signature(torch_own._initialize_stage).parameters)
            torch_own._initialize_stage(*first[:wanted])
        stage: Any = torch_own._stage
        number, count, last = stage.stage_index, self._n_microbatches, stage.is_last
        passes = {
            forward: [Work(forward, number, each) for each in range(count)]
            for forward in (True, False)
        }
        arrivals = Arrivals()
        for forward, receive in ((True, stage.get_fwd_recv_ops), (False, stage.get_bwd_recv_ops)):
            if forward or not last:
                coming = [(work, _received(receive(work.microbatch))) for work in passes[forward]]
                arrivals.expect(coming)
        most = self._shape.held(number, microbatches=count)
        left = deque(self._shape.order(number, microbatches=count))
        sent: list[Any] = []
        held, self.done = 0, []
        while left:
            work = arrivals.next(left, held=held, most=most)
            self.done.append(work)
            each = work.microbatch
            if work.forward:
                output = stage.forward_one_chunk(
                    each, inputs[each], options[each], save_forward_output=return_outputs
                )
                sent += _sent(stage.get_fwd_send_ops(each))
                torch_own._maybe_compute_loss(stage, output, target_mbs, each)
                if last:
                    arrivals.add(passes[False][each])
                held += 1
                continue
            stage.backward_one_chunk(
                each, loss=torch_own._maybe_get_loss(stage, each), last_backward=each == count - 1
            )
            sent += _sent(stage.get_bwd_send_ops(each))
            held -= 1
        for transfer in sent:
            transfer.wait()
        torch_own._update_losses(stage, losses)
        if hasattr(stage, "perform_reduce_grad"):
            stage.perform_reduce_grad(count if self.scale_grads else 1)


def _received(ops: list[Any]) -> list[Any]:
    """Begin to receive."""
    return [dist.irecv(op.tensor, src=op.peer, group=op.group) for op in ops]


def _sent(ops: list[Any]) -> list[Any]:
    """Begin to send."""
    return [dist.isend(op.tensor, dst=op.peer, group=op.group) for op in ops]
