"""From a whole model to what one rank of an island trains of it."""

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
    """Return this rank's part of a model, ready to train; every rank of the mesh calls it.

    Args:
        model: The whole model, equal on all ranks; it is taken over and changed.
        options: What to do with it.
        mesh: All four axes of `atoll.config.mesh.AXES`.
        device: What this rank computes on.
        sample: A few rows of (inputs, targets), on the first rank, by which a pipeline measures
            its units to find balanced cuts; without, it goes by their size.

    Raises:
        ConfigError: the device cannot compute in the precision, or the model cannot be divided
            like that.
    """
    check_precision(options.precision, device)
    if mesh["pipeline"].size() > 1:
        from atoll.strategies.inner.pipeline.pipeline import PipelineParts

        return PipelineParts(model, options, mesh=mesh, device=device, sample=sample)
    return WholeParts(model, options, mesh=mesh, device=device)
