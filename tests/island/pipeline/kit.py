"""What tests of pipelines share: a step under a mesh that has stages, and what all ranks found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from atoll.strategies.inner.pipeline.pipeline import PipelineParts
from tests.island.reference import batch_for, divided, gpt, gradients, perceptron

dist: Any = torch.distributed
ROWS = 16

PIPELINE_MODELS: Mapping[str, Any] = {
    "gpt": lambda: gpt(layers=5),
    "untied": lambda: gpt(layers=5, tie=False),
    "perceptron": perceptron,
}


def pipeline(model: nn.Module, axes: Mapping[str, int], **words: Any) -> PipelineParts:
    parts = divided(model, axes, **words)
    assert isinstance(parts, PipelineParts)
    parts.train(True)
    return parts


def plain_pipeline(name: str, *, rows: int = ROWS) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of a whole batch, on one device, the usual way."""
    model = PIPELINE_MODELS[name]()
    loss = model.loss(*batch_for(model, rows=rows))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def steps(
    name: str, axes: Mapping[str, int], words: Mapping[str, Any], microbatches: Sequence[int] = (0,)
) -> list[tuple[float, dict[str, Tensor]]]:
    """Return this rank's loss and gradients of one batch, for each number of microbatches."""
    found = []
    for number in microbatches:
        model = PIPELINE_MODELS[name]()
        parts = pipeline(model, axes, **{"microbatches": number, **words})
        parts.backward(*batch_for(model, rows=ROWS, seed=9))
        loss = parts.backward(*batch_for(model, rows=ROWS))
        found.append((loss.item(), gradients(parts)))
    return found


def merged(by_rank: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return what all ranks have together; what several have MUST be the same bits."""
    found: dict[str, Tensor] = {}
    for part in by_rank:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found
