"""The cuts of a pipeline on which all ranks agree."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.errors import AtollError
from atoll.strategies.inner.model_facts import criterion_of
from atoll.strategies.inner.options import InnerOptions, PipelineShape, microbatches_of
from atoll.strategies.inner.pipeline.balance import balanced
from atoll.strategies.inner.pipeline.cuts import check_cuts, cuts_by_size, profile
from atoll.strategies.inner.pipeline.stages import check_chain

dist: Any = torch.distributed  # untyped: torch's stubs lack most of the API used here


def agreed_cuts(
    model: nn.Module,
    units: list[nn.Module],
    sure: bool,
    options: InnerOptions,
    shape: PipelineShape,
    device: torch.device,
    sample: tuple[Tensor, Tensor] | None,
) -> tuple[int, ...]:
    """Return the cuts chosen by rank 0, or raise its ConfigError on all ranks; collective."""
    found: Any = None
    if dist.get_rank() == 0:
        try:
            if not sure:
                check_chain(model, units, sample[0] if sample else None)
            if options.cuts:
                found = check_cuts(options.cuts, units=len(units), stages=shape.stages)
            elif sample is not None:
                share = len(sample[0]) // (options.shape.data * options.accumulate)
                number = microbatches_of(shape, wanted=options.microbatches, rows=share)
                costs = profile(
                    units, criterion_of(model), *(t[: max(1, share // number)] for t in sample),
                    device=device, precision=options.precision,
                )  # fmt: skip
                found = balanced([cost.total_s for cost in costs], stages=shape.stages)
            else:
                found = cuts_by_size(units, stages=shape.stages)
        except AtollError as error:
            found = error
    agreed = [found]
    dist.broadcast_object_list(agreed, src=0, device=device)
    if isinstance(agreed[0], AtollError):
        raise agreed[0]
    return tuple(agreed[0])
