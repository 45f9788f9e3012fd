"""Splits a whole model into the part that one rank of an island trains."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from atoll.strategies.inner.base import Parts
from atoll.strategies.inner.options import InnerOptions
from atoll.strategies.inner.precision import check_precision
from atoll.strategies.inner.whole import WholeParts


def split_model(
    model: nn.Module,
    options: InnerOptions,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    sample: tuple[Tensor, Tensor] | None = None,
) -> Parts:
    """Return this rank's part of a model, ready to train; collective.

    The model is equal on all ranks, and owned by the result. `sample`, a few rows of (inputs,
    targets) on rank 0, lets a pipeline measure its units for balanced cuts; otherwise cuts go by
    size.

    Raises:
        ConfigError: the device does not support the precision, or the model cannot be split.
    """
    check_precision(options.precision, device)
    if mesh["pipeline"].size() > 1:
        from atoll.strategies.inner.pipeline.pipeline import PipelineParts

        return PipelineParts(model, options, mesh=mesh, device=device, sample=sample)
    return WholeParts(model, options, mesh=mesh, device=device)
