"""Pipeline parallelism: stages of a model on several ranks, fed with microbatches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from atoll.errors import ConfigError
from atoll.strategies.inner.base import Rows, sum_over_data
from atoll.strategies.inner.gradient_norm import complete
from atoll.strategies.inner.model_facts import criterion_of, saved_buffers, untrained_state
from atoll.strategies.inner.options import (
    ASYNC,
    GPIPE,
    INTERLEAVED,
    OPPORTUNISTIC,
    ActivationFormat,
    InnerOptions,
    PipelineShape,
    check_axes,
    check_microbatches,
    microbatches_of,
)
from atoll.strategies.inner.parallelize import parallelize
from atoll.strategies.inner.pipeline.activations import Activations
from atoll.strategies.inner.pipeline.agreed_cuts import agreed_cuts
from atoll.strategies.inner.pipeline.confined import Confined
from atoll.strategies.inner.pipeline.cuts import check_stages, check_ties
from atoll.strategies.inner.pipeline.opportunistic import Opportunistic
from atoll.strategies.inner.pipeline.shapes import (
    Kinds,
    StageShapes,
    TiedGradients,
    empties,
    kinds_of,
    row_group,
)
from atoll.strategies.inner.pipeline.stages import (
    Stage,
    chain_of,
    criterion_alone,
    cut_up,
    names_of,
    shared,
)
from atoll.strategies.inner.pipeline.stream import Batch, Neighbours, RankStage, Stream
from atoll.strategies.inner.pipeline.timing import Watch, WatchedStage
from atoll.strategies.inner.precision import widened
from atoll.strategies.inner.replicate import average, average_changes

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here

KEPT = 4
"""Schedules in the cache, each with buffers for one shape of microbatches."""


class PipelineParts:
    """One or more stages of a model on this rank, perhaps sharded further; see :class:`Parts`.

    Stage s is on rank s % p of a row of p ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        options: InnerOptions,
        *,
        mesh: DeviceMesh,
        device: torch.device,
        sample: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Split a model in main memory, equal on all ranks; collective.

        Parts that are not on this rank are freed. `sample` as in :func:`split_model`.

        Raises:
            ConfigError: the model cannot be split like that, or the schedule does not exist.
        """
        self.mesh = mesh
        self._options, self._device = options, device
        self._group = mesh.get_group("pipeline")
        self._rank = mesh.get_local_rank("pipeline")
        self._rows = Rows.of(mesh)
        self.shape = PipelineShape(options.schedule, mesh["pipeline"].size(), options.chunks)
        if options.microbatches:
            check_microbatches(self.shape, options.microbatches)
        # Without the parameters, which a bound method would keep in memory. Tensor parallelism
        # may replace it.
        vars(model)["criterion"] = criterion_alone(model)
        units, sure = chain_of(model)
        check_stages(len(units), self.shape)
        form = ActivationFormat.of(options.activations)
        check_axes(options)
        self._activations = Activations(form)
        self.confined = (
            Confined(model, form.size, group=self._group, device=device) if form.size else None
        )
        self.cuts = agreed_cuts(model, units, sure, options, self.shape, device, sample)
        """Units before which the model is cut."""
        stages = cut_up(units, self.cuts)
        names = names_of(model)
        order = {name: place for place, name in enumerate(names.values())}
        saved, rest = saved_buffers(model), untrained_state(model)
        numbers = range(self._rank, self.shape.stages, self.shape.ranks)
        own = {
            number: Stage(
                stages[number], names=names, precision=options.precision, device=device,
                receives=self._activations if number else None,
                sends=self._activations if number < self.shape.stages - 1 else None,
            )
            for number in numbers
        }  # fmt: skip
        ties = shared(stages, names)
        check_ties(ties, self.shape)
        holders = _ranks_of(ties, self.shape)
        trains = [any(p.requires_grad for u in units for p in u.parameters()) for units in stages]
        self._modules = {
            number: parallelize(
                stage,
                list(stage.chain),
                model=model,
                mesh=mesh,
                options=options,
                device=device,
                later=self.shape.schedule == ASYNC,  # which averages when a batch is complete
            )
            for number, stage in own.items()
        }
        self._criterion = criterion_of(model)
        found = {n: p for stage in own.values() for n, p in stage.trained().items()}
        self._parameters = {name: found[name] for name in sorted(found, key=order.__getitem__)}
        self._buffers = {n: b for stage in own.values() for n, b in stage.among(saved).items()}
        self._untrained = {n: t for stage in own.values() for n, t in stage.among(rest).items()}
        self._tied = TiedGradients(holders, self._parameters, mesh=mesh, device=device)
        self._learns = [any(trains[:number]) for number in range(self.shape.stages + 1)]
        self._stage_shapes = StageShapes(
            self._modules, self.shape, self._activations, group=self._group, device=device
        )
        self._schedules: dict[Any, Any] = {}
        self._factor = 1.0
        self.watch = Watch(device)
        """Times of this rank's stages, while enabled."""
        self.stream: Stream | None = None
        """The passes of an asynchronous pipeline."""
        if self.shape.schedule == ASYNC:
            self.stream = self._new_stream()
            self._parameters = self.stream.weights.newest
        if self.confined is not None:
            last = own.get(self.shape.stages - 1)
            ended = set(last.trained()) if last is not None else set()
            sending = {n: p for n, p in self._parameters.items() if n not in ended}
            self.confined.hold(sending, ends=last is not None)
            self._activations.boundary = self.confined.boundary
        # All ranks of a row MUST take part in a collective before neighbours exchange tensors.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        self.constrain()

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """See :meth:`Parts.parameters`."""
        return self._parameters

    def buffers(self) -> Mapping[str, Tensor]:
        """See :meth:`Parts.buffers`."""
        return self._buffers

    def untrained(self) -> Mapping[str, Tensor]:
        """See :meth:`Parts.untrained`."""
        return self._untrained

    def train(self, mode: bool) -> None:
        """See :meth:`Parts.train`."""
        for module in self._modules.values():
            module.train(mode)

    @property
    def constrained(self) -> bool:
        """See :meth:`Parts.constrained`."""
        return self.confined is not None and not self.confined.subspace.whole

    def constrain(self) -> None:
        """See :meth:`Parts.constrain`."""
        if self.confined is not None:
            self.confined.load()

    def stepping(self) -> AbstractContextManager[None]:
        """See :meth:`Parts.stepping`."""
        return nullcontext() if self.confined is None else self.confined.in_coordinates()

    def constrain_gradients(self) -> None:
        """Drop what a gradient would change against the constraint; local."""
        if self.confined is not None:
            self.confined.project_gradients()

    def average_gradients(self) -> None:
        """Average gradients of the same stage over its replicas, if they were not by backward."""
        if self.shape.schedule == ASYNC and self._rows.ranks > 1:
            average(list(self._parameters.values()), self.mesh.get_group("replicate"))

    def microbatches(self, rows: int) -> int:
        """Return the number of microbatches per accumulation step; raises as :meth:`Rows.check`."""
        options = self._options
        share = rows // (self._rows.ranks * options.accumulate)
        number = microbatches_of(self.shape, wanted=options.microbatches, rows=share)
        replace(self._rows, accumulate=options.accumulate, microbatches=number).check(rows)
        return number

    def passes(self, rows: int) -> int:
        """Return the number of microbatches that pass through the pipeline in sequence.

        Accumulation steps go through together, which reduces idle time, except for `gpipe`, which
        would hold too many activations and runs them one by one.
        """
        together = 1 if self.shape.schedule == GPIPE else self._options.accumulate
        return self.microbatches(rows) * together

    def boundary_bytes(self, inputs: Tensor) -> int:
        """Return the bytes of a microbatch of a batch, on its way out of the first stage.

        Gradients come back in as many. Collective if the shape is new.
        """
        part = self._rows.share(inputs)[0].chunk(self.passes(len(inputs)))[0]
        kinds = self._stage_shapes.kinds(part.to(self._device))[0]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)

    def backward(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, summed: bool = True
    ) -> Tensor:
        """See :meth:`Parts.backward`."""
        for parameter in self._parameters.values():
            parameter.grad = None
        if self.stream is not None:
            batch = self.batch(inputs, targets, scale=scale)
            before = [buffer.clone() for buffer in self._buffers.values()]
            with self.watch.passing(self._group):
                self.stream.feed(batch, _ignored)
                self.stream.drain(_ignored)
            self.average_gradients()
            self.constrain_gradients()
            average_changes(self._buffers.values(), before, mesh=self.mesh)
            total = torch.tensor(batch.loss, dtype=torch.float64, device=self._device) / scale
            return self._data_mean(total) if summed else total / self._rows.ranks
        number, passes = self.microbatches(len(inputs)), self.passes(len(inputs))
        parts = self._options.accumulate
        runs = number * parts // passes
        mine = self._rows.share(inputs, targets)
        before = [buffer.clone() for buffer in self._buffers.values()]
        self._factor = scale / (number * parts)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for part in zip(*(t.chunk(runs) for t in mine), strict=True):
            total += self._run(*part, microbatches=passes)
        complete(self._parameters.values())
        self._tied.add_up()
        self.constrain_gradients()
        average_changes(self._buffers.values(), before, mesh=self.mesh)
        if not summed:  # only the last rank of each row has a share
            return total / (scale * (self.mesh.size() // self.shape.ranks))
        return self._data_mean(total / scale)

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :meth:`Parts.loss`.

        Rows are padded with copies of the first one, so that all microbatches have the same shape.
        """
        share, number = self._rows, self.shape.ranks
        rows = len(inputs)
        each = -(-rows // (share.ranks * number))
        first = share.rank * number * each
        at = torch.arange(first, first + number * each)
        at = torch.where(at < rows, at, 0)
        counts = [min(max(rows - first - k * each, 0), each) for k in range(number)]
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        expected = targets[at].to(self._device).chunk(number)
        outputs = self._stage_shapes.forward(inputs[at].to(self._device), microbatches=number)
        for part, right, count in zip(outputs, expected, counts, strict=False):
            if count:
                part = widened(part[:count], self._options.precision)
                total += self._criterion(part, right[:count]) * (count / rows * share.ranks)
        self._reshard()
        return self._data_mean(total)

    # --------------------------------------------------------------------------- one batch

    def batch(
        self, inputs: Tensor, targets: Tensor, *, scale: float = 1.0, rates: Sequence[float] = ()
    ) -> Batch:
        """Return a batch for an asynchronous pipeline; raises as :meth:`Rows.check`."""
        number = self.passes(len(inputs))
        given, expected = (t.to(self._device) for t in self._rows.share(inputs, targets))
        return Batch(given.chunk(number), expected.chunk(number), scale / number, rates)

    def _new_stream(self) -> Stream:
        names = range(self.shape.ranks)
        neighbours = Neighbours(
            forward=self._group, backward=row_group(names, self.mesh), device=self._device,
            depth=2 * self.shape.ranks,
        )  # fmt: skip
        module, shapes = self._modules[self._rank], self._stage_shapes
        stage = RankStage(self._rank, module, self._loss_alone, shapes, self._learns)
        parameters, watch = self._parameters, self.watch
        return Stream(stage, parameters, self.shape, neighbours, self._activations, watch)

    def _loss_alone(self, outputs: Any, targets: Tensor) -> Tensor:
        return self._criterion(widened(outputs, self._options.precision), targets)

    def _run(self, inputs: Tensor, targets: Tensor, *, microbatches: int) -> Tensor:
        """Run this rank's rows through the pipeline; return the sum of scaled losses, or 0."""
        inputs = inputs.to(self._device).contiguous()  # the stages of torch 2.11 refuse cuts
        schedule = self._schedule(inputs[: len(inputs) // microbatches], microbatches)
        self._activations.begin(inputs.chunk(microbatches))
        losses: list[Tensor] = []
        given = [inputs] if self._rank == 0 else []
        expected = targets.to(self._device) if self._rank == self.shape.ranks - 1 else None
        with self.watch.passing(self._group):
            schedule.step(*given, target=expected, losses=losses, return_outputs=False)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for loss in losses:
            total += loss.detach()
        return total

    def _schedule(self, part: Tensor, microbatches: int) -> Any:
        """Return torch's schedule for a shape of microbatches; collective if it is new."""
        key = (tuple(part.shape), part.dtype, microbatches)
        if key not in self._schedules:
            kinds = self._stage_shapes.kinds(part)
            self._reshard()
            if len(self._schedules) == KEPT:
                del self._schedules[next(iter(self._schedules))]
            self._schedules[key] = self._new_schedule(part, kinds, microbatches)
        return self._schedules[key]

    def _new_schedule(self, part: Tensor, kinds: list[Kinds], microbatches: int) -> Any:
        kinds_between = [kinds_of((part,)), *kinds]
        stages = [
            WatchedStage(
                module, number, self.shape.stages, self._device,
                input_args=empties(kinds_between[number], learns=self._learns[number]),
                output_args=empties(kinds_between[number + 1], learns=self._learns[number + 1]),
                group=self._group, watch=self.watch, activations=self._activations,
            )
            for number, module in self._modules.items()
        ]  # fmt: skip
        options: dict[str, Any] = {"loss_fn": self._scaled_loss, "scale_grads": False}
        if self.shape.schedule == INTERLEAVED:
            return ScheduleInterleaved1F1B(list(stages), microbatches, **options)
        if self.shape.schedule == OPPORTUNISTIC:
            return Opportunistic(stages[0], microbatches, shape=self.shape, **options)
        kind = ScheduleGPipe if self.shape.schedule == GPIPE else Schedule1F1B
        return kind(stages[0], microbatches, **options)

    def _scaled_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        with self.watch.busy(self.shape.stages - 1, forward=True):
            return self._loss_alone(outputs, targets) * self._factor

    def _data_mean(self, total: Tensor) -> Tensor:
        """Return the mean over the data ranks of a value on the last ranks of rows."""
        last = self.shape.ranks - 1
        dist.broadcast(total, group_src=last, group=self._group)
        return sum_over_data(total, self.mesh) / self._rows.ranks

    def _reshard(self) -> None:
        """Free gathered parameters, which would otherwise outlive a change of the shards."""
        for stage in self._modules.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()


def _ignored(batch: Batch) -> None:
    """Leave the gradient of a batch where it is."""


def _ranks_of(ties: Mapping[str, list[int]], shape: PipelineShape) -> dict[str, list[int]]:
    """Return the ranks of a row that hold each weight shared by stages.

    Raises:
        ConfigError: two of the stages are on one rank.
    """
    for name, stages in ties.items():
        ranks = [stage % shape.ranks for stage in stages]
        if len(set(ranks)) < len(ranks):
            raise ConfigError(
                "two stages on one rank share a weight",
                given=f"{name} on stages {stages}, {shape.ranks} ranks in a row",
                expected="stages that share a weight on different ranks",
                remedy='schedule = "1f1b" in [island], or other cuts',
            )
    return {name: [stage % shape.ranks for stage in stages] for name, stages in ties.items()}
