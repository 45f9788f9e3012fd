"""Memory of the model stages that one rank computes, found by running them on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from atoll.plan.cutting import cut_tensors
from atoll.plan.tracking import Tracking
from atoll.strategies.inner.base import Rows
from atoll.strategies.inner.options import (
    GPIPE,
    InnerOptions,
    PipelineShape,
    microbatches_of,
)
from atoll.strategies.inner.pipeline.checks import check_pipeline
from atoll.strategies.inner.pipeline.cuts import (
    as_tuple,
    check_cuts,
    check_ties,
    cuts_by_size,
)
from atoll.strategies.inner.pipeline.stages import chain_of, cut_up, names_of, shared
from atoll.strategies.inner.precision import computing, widened
from atoll.strategies.inner.unit_transforms import apply_recompute
from atoll.strategies.inner.units import pieces, units_of

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Bytes of one pass of a microbatch through a rank's stages."""

    kept: int
    """Live between forward and backward: activations, including copies of weights."""
    copies: int
    """Part of `kept`: weights in half precision."""
    working: int
    """Peak beyond `kept`, without gradients of parameters."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The part of a model at one position of the pipeline."""

    modules: Sequence[nn.Module]
    """Stages, or the whole model; tensor-parallel slices if tensors are split."""
    units: Sequence[Sequence[nn.Module]]
    names: Mapping[int, str]
    """Names of the parameters in the whole model, by `id`."""
    passed: StageOutput
    held: int
    """Passes kept for backward at one time."""
    delay: int = 0
    """Older versions of the weights kept at one time."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter; tied ones once."""
        found = (p for module in self.modules for p in module.parameters())
        return {self.names[id(p)]: p for p in found}

    @property
    def buffers(self) -> list[Tensor]:
        """Every buffer."""
        return list({id(b): b for module in self.modules for b in module.buffers()}.values())


class Cut:
    """A whole model on fake tensors, cut into the stages of a pipeline."""

    def __init__(self, model: Any, options: InnerOptions, *, batch: int) -> None:
        """Take over `model` within a fake tensor mode; raises ConfigError if it cannot be cut."""
        self._model, self._options = model, options
        cut_tensors(model, options)
        self._names = names_of(model)
        shape = options.shape
        self._pipeline = PipelineShape(options.schedule, shape.pipeline, options.chunks)
        self.cuts: tuple[int, ...] = ()
        """Units before which the model is cut, as far as known without measuring."""
        rows = Rows(ranks=shape.data, accumulate=options.accumulate)
        self.microbatches = 1
        if shape.pipeline > 1:
            check_pipeline(model, options)
            share = batch // (shape.data * options.accumulate)
            self.microbatches = microbatches_of(
                self._pipeline, wanted=options.microbatches, rows=share
            )
            rows = replace(rows, microbatches=self.microbatches)
        rows.check(batch)
        self.rows = batch // (rows.ranks * rows.accumulate * rows.microbatches)

    def places(self, inputs: Tensor, targets: Tensor) -> list[Stages]:
        """Run the stages in order and return what each position of the pipeline holds."""
        self._model.train()
        if self._options.shape.pipeline == 1:
            units = units_of(self._model)
            self._recompute(self._model, units)
            passed, _ = self._run([self._model], (inputs,), targets, kept_output=False)
            return [Stages([self._model], [units], self._names, passed, 1)]
        units, _ = chain_of(self._model)
        stages = self._pipeline.stages
        if self._options.cuts:
            self.cuts = check_cuts(self._options.cuts, units=len(units), stages=stages)
        else:
            self.cuts = cuts_by_size(units, stages=stages)
        cut = cut_up(units, self.cuts)
        check_ties(shared(cut, self._names), self._pipeline)
        return self._rows_of_stages(cut, inputs, targets)

    def _rows_of_stages(
        self, stages: list[list[nn.Module]], inputs: Tensor, targets: Tensor
    ) -> list[Stages]:
        values: tuple[Tensor, ...] = (inputs,)
        passes: list[StageOutput] = []
        modules = [nn.ModuleList(units) for units in stages]
        for number, (module, units) in enumerate(zip(modules, stages, strict=True)):
            self._recompute(module, units)
            last = number == len(stages) - 1
            stage_targets = targets if last else None
            passed, outputs = self._run(units, values, stage_targets, kept_output=True)
            received = sum(v.untyped_storage().nbytes() for v in values) if number else 0
            passes.append(replace(passed, kept=passed.kept + received))
            values = tuple(v.detach().requires_grad_(v.is_floating_point()) for v in outputs)
        shape, count = self._pipeline, self.microbatches
        if shape.schedule != GPIPE:  # other schedules run all accumulation steps in one pass
            count *= self._options.accumulate
        found = []
        for rank in range(shape.ranks):
            own = range(rank, shape.stages, shape.ranks)
            found.append(
                Stages(
                    [modules[n] for n in own], [stages[n] for n in own], self._names,
                    _mean([passes[n] for n in own]), shape.held(rank, microbatches=count),
                    shape.delay(rank, microbatches=count),
                )
            )  # fmt: skip
        return found

    def _recompute(self, module: nn.Module, units: Sequence[nn.Module]) -> None:
        own = [part for piece in pieces(module, units) for part in piece]
        apply_recompute(own, self._options.recompute)

    def _run(
        self, chain: Sequence[nn.Module], values: tuple[Tensor, ...], targets: Tensor | None,
        *, kept_output: bool,
    ) -> tuple[StageOutput, tuple[Tensor, ...]]:  # fmt: skip
        return run_units(
            chain, values, targets, criterion=self._model.criterion,
            precision=self._options.precision, kept_output=kept_output,
        )  # fmt: skip


def run_units(
    chain: Sequence[nn.Module], values: tuple[Tensor, ...], targets: Tensor | None, *,
    criterion: Any, precision: str, kept_output: bool = True,
) -> tuple[StageOutput, tuple[Tensor, ...]]:  # fmt: skip
    """Run both passes of chained units on fake tensors; with `targets` to the loss.

    Without `kept_output` the outputs are freed as soon as there is a loss.
    """
    own = [p for module in chain for p in module.parameters()]
    with Tracking(own) as tracking:
        outputs = values
        with computing(precision, CPU):
            for module in chain:
                outputs = as_tuple(module(*outputs))
        ends = list(outputs)
        if targets is not None:
            ends = [criterion(widened(outputs[0], precision), targets)]
            if not kept_output:
                outputs = ()
        kept, copies = tracking.alive_bytes, tracking.copied_bytes
        ends = [end for end in ends if end.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
        most = tracking.most_bytes
    for parameter in own:
        parameter.grad = None
    return StageOutput(kept, copies, max(0, most - kept)), outputs


def _mean(passes: Sequence[StageOutput]) -> StageOutput:
    """Average passes over a rank's stages; working memory is the maximum."""
    count = len(passes)
    return StageOutput(
        math.ceil(sum(p.kept for p in passes) / count),
        math.ceil(sum(p.copies for p in passes) / count),
        max(p.working for p in passes),
    )
