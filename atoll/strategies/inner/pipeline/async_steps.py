"""Optimizer steps of a pipeline that is not flushed between batches.

Each stage steps when its gradient of a batch is complete, on its newest weights, while other
batches are in flight. The delay is corrected by the look-ahead of Nesterov's method (Ajanthan et
al., https://arxiv.org/abs/2505.01099): the optimizer keeps the weights at the point to which its
momentum will move them, so that a gradient that arrives some updates later fits. torch's `NAdam`
and `SGD(nesterov=True)` do this within their step. No other state is needed, so checkpoints, rounds
and recovery are those of an ordinary optimizer, and with one stage the step is that optimizer's.

Replicas of a stage average their gradients of a batch before they step. All do so in the same
order, so they cannot deadlock.

The loss and norm of a batch travel from stage to stage with its gradients. The first rank has them
when the batch has come back; waiting for those of the batch just begun would empty the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.strategies.inner.base import sum_over_data
from atoll.strategies.inner.pipeline.lookahead import check_lookahead
from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from atoll.strategies.inner.pipeline.stream import Batch
from atoll.strategies.inner.replicate import average_changes
from atoll.strategies.inner.sharded_optimizer import LocalShard, clip_factor

SUMS = (((3,), torch.float64),)
"""What follows a batch's gradients: loss, squares of the gradient, stages that refused it."""


@dataclass(frozen=True, slots=True)
class Returned:
    """What is known of a batch that has come back."""

    loss: float
    norm: float
    """Of the whole gradient, before clipping."""
    finite: bool


class AsyncSteps:
    """Steps of one rank's stage; every method on all ranks alike."""

    def __init__(self, parts: PipelineParts, own: LocalShard, *, clip: float) -> None:
        """Step on `own` shard of the parts.

        No rank knows the whole gradient when it steps. So `clip` limits the norm of each of p
        stages to clip / sqrt(p), and with that the norm of the whole to `clip`.

        Raises:
            ConfigError: the optimizer has no look-ahead.
        """
        if parts.stream is None:
            raise RuntimeError("the parts have another schedule")
        check_lookahead(own.optimizer)
        self._parts, self._own, self._stream = parts, own, parts.stream
        self._limit = clip / math.sqrt(parts.shape.ranks)
        self._returned: list[Returned] = []
        self._reported = Returned(0.0, 0.0, finite=True)
        self._empty = True
        self._keep_buffers()

    def step(self, inputs: Tensor, targets: Tensor, *, rates: Sequence[float]) -> Returned:
        """Start a batch, and do the updates that are due.

        Returns:
            On the first rank, the mean of what came back since the last step, or the previous
            result if nothing did. Meaningless on other ranks.
        """
        self._stream.feed(self._parts.batch(inputs, targets, rates=rates), self._update)
        if self._empty:
            # The first step has no earlier result to return, so it drains. So does a step after
            # any drain: a resumed job MUST do the same as one that was not interrupted.
            self._drain()
            self._empty = False
        return self._report()

    def drain(self) -> None:
        """Finish all batches and their updates; the next step is drained, too."""
        self._drain()
        self._empty = True

    def _drain(self) -> None:
        self._stream.drain(self._update)
        average_changes(self._parts.buffers().values(), self._before, mesh=self._parts.mesh)
        self._keep_buffers()

    def _keep_buffers(self) -> None:
        """Replicas share the changes of their buffers whenever the pipeline is drained."""
        self._before = [buffer.clone() for buffer in self._parts.buffers().values()]

    def _report(self) -> Returned:
        found, self._returned = self._returned, []
        if found:
            self._reported = Returned(
                sum(one.loss for one in found) / len(found),
                sum(one.norm for one in found) / len(found),
                all(one.finite for one in found),
            )
        return self._reported

    def _update(self, batch: Batch) -> None:
        """Step with the gradient of a batch, unless it is not finite."""
        stream = self._stream
        self._parts.average_gradients()
        self._parts.constrain_gradients()
        gradients = list(self._own.gradients().values())
        squares = sum(float(n) ** 2 for n in torch._foreach_norm(gradients)) if gradients else 0.0
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        device = gradients[0].device if gradients else batch.inputs[0].device
        loss = batch.loss
        if stream.last:  # replicas MUST decide alike
            ranks = self._parts.mesh["replicate"].size()
            mean = torch.tensor(loss / ranks, dtype=torch.float64, device=device)
            loss = float(sum_over_data(mean, self._parts.mesh))
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            stream.protect()
            self._own.set_rates(batch.rates)
            with self._parts.stepping():
                self._own.step(factor=clip_factor(norm, self._limit))
        else:
            self._own.forget()
        sums = torch.tensor(
            [loss, squares, 0.0 if finite else 1.0], dtype=torch.float64, device=device
        )
        if not stream.last:
            sums += stream.neighbours.receive(SUMS, moving=-1)[0]
        if not stream.first:
            stream.neighbours.send([sums], to=-1)
            return
        whole_loss, total, refused = sums.tolist()
        whole = math.sqrt(total) if total >= 0 else math.nan
        self._returned.append(Returned(whole_loss, whole, refused == 0))
